"""`SkywardOperator`: a task whose function runs on machines that exist only for that task.

Airflow's engine (retries, state, XCom) stays in the task's process. Only the function and its arguments travel, and
nodes need no Airflow. One `execute` opens the pool, submits the call (with `map_over`, one call for each item), writes
the nodes' output to the task log, and closes the pool in every case.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowException, AirflowFailException

import skyward_core as sky
from airflow_provider_skyward.calls import calls_of, refuse_callable
from airflow_provider_skyward.pool_keywords import (
    OTHER_NAMES,
    POOL_FIELDS,
    POOL_KEYWORDS,
    as_keywords,
    as_plain_data,
)
from airflow_provider_skyward.secrets import shown
from airflow_provider_skyward.task_attempt import Killed, TaskAttempt

if TYPE_CHECKING:
    from airflow.sdk import Context

MAX_XCOM_BYTES = 1_000_000
"""Largest result that goes into Airflow's database by default: every reader of the task's row loads it."""

OWN_KEYWORDS = ("python_callable", "op_args", "op_kwargs", "map_over", "spec", "max_xcom_bytes")
KNOWN_KEYWORDS = frozenset({*POOL_KEYWORDS, *OWN_KEYWORDS, *inspect.signature(BaseOperator.__init__).parameters})
"""Computed once: an operator is made at each parse of each DAG file, and reading a signature takes half of that time.
"""


def _names_pool_keywords[F: Callable[..., None]](init: F) -> F:
    """Show the fields of PoolSpec in a constructor's signature: Airflow reads there which names `partial`, `expand` and
    `default_args` accept.
    """
    *own, rest = inspect.signature(init).parameters.values()
    pool = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in POOL_KEYWORDS]
    init.__signature__ = inspect.Signature([*own, *pool, rest])  # type: ignore[attr-defined]
    return init


class SkywardOperator(BaseOperator):
    """Run a function on a pool of machines that lives as long as the task.

    Takes the keywords of `ComputePool` beside Airflow's own, or `spec`, a PoolSpec or its plain data, which single
    keywords override. `pool` stays Airflow's pool of slots; `timeout` is the idle pool's, not the task's: that is
    `execution_timeout`; `retries` are the task's, those of the pool's calls are `call_retries`. All of them, `op_args`
    and `op_kwargs` are templates.
    `map_over` names the argument(s) that hold a sequence: the function is called once for each item, all on this one
    pool, and the task returns the list of results in order. The result goes to XCom, unless its JSON is larger than
    `max_xcom_bytes` (None: no limit); the bill goes to the XCom `skyward_cost`, and the pool's id, before anything is
    rented, to the XCom `skyward_pool`.

    The pool's keywords are kept as plain data; no provider gets a request before the task runs. Raises BadRequest
    while the DAG is parsed.

        SkywardOperator(task_id="train", python_callable=train, op_args=["{{ ds }}"], accelerator="A100",
        image=sky.Image(pip=["torch"]))
    """

    template_fields: Collection[str] = ("op_args", "op_kwargs", *POOL_KEYWORDS)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "op_args": "py",
        "op_kwargs": "py",
        **dict.fromkeys(("provider", "image", "volume", "env"), "json"),
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "op_kwargs")
    ui_color = "#e3f0ea"
    _attempt: TaskAttempt | None = None

    @_names_pool_keywords
    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        map_over: str | Sequence[str] | None = None,
        spec: sky.PoolSpec | Mapping[str, Any] | None = None,
        max_xcom_bytes: int | None = MAX_XCOM_BYTES,
        **kwargs: Any,
    ) -> None:
        _refuse_unknown(type(self).__name__, kwargs)
        given = as_keywords(spec) | {field: kwargs.pop(name) for name, field in POOL_FIELDS.items() if name in kwargs}
        if map_over:
            # else inferred from the function's return type, of which the task returns a list
            kwargs["multiple_outputs"] = False
        super().__init__(**kwargs)
        self.python_callable = python_callable
        self.op_args = op_args if op_args is not None else ()
        self.op_kwargs = op_kwargs if op_kwargs is not None else {}
        self.map_over = (map_over,) if isinstance(map_over, str) else tuple(map_over or ())
        self.max_xcom_bytes = max_xcom_bytes
        refuse_callable(python_callable, self.op_args, self.op_kwargs, self.map_over)
        plain = as_plain_data(given)
        for field, value in plain.items():
            setattr(self, OTHER_NAMES.get(field, field), value)
        self._given = tuple(plain)
        self.template_fields = tuple(
            name
            for name in type(self).template_fields
            if POOL_FIELDS.get(name, name) in plain or name not in POOL_FIELDS
        )

    @property
    def pool_spec(self) -> sky.PoolSpec:
        """The pool's spec, after templates are rendered. Raises BadRequest if a rendered value is not valid."""
        return sky.PoolSpec.of(**{field: shown(getattr(self, OTHER_NAMES.get(field, field))) for field in self._given})

    def execute(self, context: Context) -> Any:
        """Run the function on its own pool and return its result; close the pool in every case."""
        self._attempt = attempt = TaskAttempt(self.log, context)
        try:
            calls = calls_of(self.python_callable, self.op_args, self.op_kwargs, self.map_over, context)
            results = attempt.run(self.pool_spec, calls)
        except Killed:
            raise AirflowException("the task was asked to stop while its function ran; the pool is closed") from None
        # the work is done and paid for: another try would do it again, and fail here again
        except sky.ResultNotLoaded as error:
            raise AirflowFailException(f"{error}: not tried again") from error
        except sky.BudgetExceeded as error:  # another try would cost again, and fail here again
            raise AirflowFailException(
                f"{error}: not tried again. Allow more (max_cost, budget), or ask for less"
            ) from error
        finally:
            self._attempt = None
            attempt.push_bill()
        result = results if self.map_over else results[0]
        if self.do_xcom_push:
            _refuse_too_large(result, self.max_xcom_bytes)
        return result

    def on_kill(self) -> None:
        """Hand the machines' end to the pool's reaper and make `execute` end now.

        Airflow calls this in a signal handler, and sends SIGKILL 5 seconds later. A local pool is gone about a second
        later. SIGKILL does not end the reaper, because the reaper is in another session: it goes on until all machines
        are gone.
        """
        if self._attempt is not None:
            self._attempt.kill()


for _name in POOL_KEYWORDS:
    # omitted fields are not set: Airflow takes 2 µs for each attribute of an instance, and there are two dozen
    setattr(SkywardOperator, _name, None)


def _refuse_unknown(operator: str, keywords: Mapping[str, Any]) -> None:
    for name in keywords:
        if name not in KNOWN_KEYWORDS and not name.startswith("_"):
            near = get_close_matches(name, KNOWN_KEYWORDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the pool's keywords are {', '.join(POOL_KEYWORDS)}"
            raise sky.BadRequest(f"{operator} has no keyword {name!r}; {hint}")


def _refuse_too_large(result: object, limit: int | None) -> None:
    """Raise AirflowFailException (a retry would only cost again) for a result that XCom cannot take.

    A custom backend has its own limits.
    """
    # imported only when a task runs: parsing a DAG does not need them
    from airflow.sdk.execution_time.xcom import XCom
    from airflow.sdk.serde import serialize

    if XCom.serialize_value is not BaseXCom.serialize_value:
        return
    advice = (
        "write it to storage on the node and return its path, or set [core] xcom_backend to one that stores in files"
    )
    try:
        size = len(json.dumps(serialize(result)))
    except (TypeError, ValueError, RecursionError) as error:
        raise AirflowFailException(
            f"the result, a {type(result).__name__}, is nothing that XCom can store ({error}): {advice}"
        ) from error
    if limit is not None and size > limit:
        raise AirflowFailException(
            f"the result takes {size:,} bytes as XCom, more than {limit:,} (max_xcom_bytes): {advice}"
        )
