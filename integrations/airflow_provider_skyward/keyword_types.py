"""The keywords of the operators and of the decorator, for editors and type checkers. Nothing here runs.

A keyword of the pool may also be known only in a run: a template, or the result of another task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from airflow.sdk import DAG, TaskGroup, XComArg

import skyward_core as sky

type Later = str | XComArg
"""A template, or the result of another task."""
type ProviderLike = str | sky.Provider | Mapping[str, Any]
type AcceleratorLike = str | sky.Accelerator | sky.Alternative | Mapping[str, Any]
type VolumeLike = sky.Volume | Mapping[str, Any]
type Callbacks = Callable[[Any], object] | Collection[Callable[[Any], object]] | None


class AirflowKeywords(TypedDict, total=False):
    """Those of Airflow's BaseOperator."""

    task_id: str
    owner: str
    email: str | Sequence[str] | None
    email_on_retry: bool
    email_on_failure: bool
    retries: int | None
    retry_delay: timedelta | float
    retry_exponential_backoff: float
    max_retry_delay: timedelta | float | None
    retry_policy: Any
    start_date: datetime | None
    end_date: datetime | None
    depends_on_past: bool
    ignore_first_depends_on_past: bool
    wait_for_past_depends_before_skipping: bool
    wait_for_downstream: bool
    dag: DAG | None
    params: Mapping[str, Any] | None
    default_args: Mapping[str, Any] | None
    priority_weight: int
    weight_rule: Any
    queue: str
    pool: str | None
    pool_slots: int
    sla: timedelta | None
    execution_timeout: timedelta | None
    on_execute_callback: Callbacks
    on_failure_callback: Callbacks
    on_success_callback: Callbacks
    on_retry_callback: Callbacks
    on_skipped_callback: Callbacks
    pre_execute: Any
    post_execute: Any
    trigger_rule: str
    resources: Mapping[str, Any] | None
    run_as_user: str | None
    map_index_template: str | None
    max_active_tis_per_dag: int | None
    max_active_tis_per_dagrun: int | None
    executor: str | None
    executor_config: Mapping[str, Any] | None
    do_xcom_push: bool
    multiple_outputs: bool
    inlets: Any
    outlets: Any
    task_group: TaskGroup | None
    doc: str | None
    doc_md: str | None
    doc_json: str | None
    doc_yaml: str | None
    doc_rst: str | None
    task_display_name: str | None
    logger_name: str | None
    allow_nested_operators: bool
    render_template_as_native_obj: bool | None


class PoolKeywords(AirflowKeywords, total=False):
    """Those of `ComputePool`, with the names that they have in a task: `sky.PoolKeywords` has the same for a pool."""

    provider: ProviderLike | Sequence[ProviderLike] | Later | None
    image: sky.Image | Mapping[str, Any] | Later
    nodes: int | tuple[int | Later, int | Later] | Later
    machine: Later | None
    accelerator: AcceleratorLike | Sequence[AcceleratorLike] | Later | None
    selection: Literal["cheapest", "first"] | Later
    cpu: int | Later | None
    memory: Later | None
    architecture: Literal["x86_64", "arm64"] | Later | None
    volume: VolumeLike | Sequence[VolumeLike] | Later | None
    spot: sky.SpotLike | Mapping[str, Any] | Later | None
    timeout: float | Later
    max_lifetime: float | Later | None
    lease_seconds: float | Later
    call_retries: int | Later
    max_cost: float | Later | None
    max_hourly_cost: float | Later | None
    max_price_ratio: float | Later
    budget: Later | None
    env: Mapping[str, str | Later] | Later | None
    secrets: str | Sequence[str] | Mapping[str, Any] | Later | None
    concurrency: int | Later
    provision_timeout: float | Later
    display: Literal["log", "spinner", "quiet"] | Later
    node_output: Literal["all", "head"] | Later
    collect_metrics: bool | Later
    name: Later | None
    keep_warm: float | Later
    scale_up_after: float | Later
    scale_down_after: float | Later


class SetupKeywords(PoolKeywords, total=False):
    """Those of `SkywardCreatePool` and `skyward_pool`."""

    spec: sky.PoolSpec | Mapping[str, Any] | None
    skyward_conn_id: str | None
    provider_conn_id: str | None
    on_budget_warning: Callable[[Any], object] | Sequence[Callable[[Any], object]]


class ProgramKeywords(SetupKeywords, total=False):
    """Those of `SkywardRunOperator`."""

    broadcast: bool
    durable: bool | None
    deferrable: bool | None
    skyward_pool: XComArg | None
    result_path: str | None


class DecoratorKeywords(ProgramKeywords, total=False):
    """Those of `@task.skyward`."""

    templates_dict: dict[str, Any] | None
    templates_exts: Sequence[str] | None
    show_return_value_in_logs: bool
    map_over: str | Sequence[str] | None
    max_xcom_bytes: int | None
