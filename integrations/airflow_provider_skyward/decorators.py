"""`@task.skyward`: `SkywardOperator` for a decorated function.

Editors and type checkers know `airflow_provider_skyward.decorators.skyward_task`, which is the same, with its keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_provider_skyward.operators import SkywardOperator

if TYPE_CHECKING:
    from airflow_provider_skyward.keyword_types import DecoratorKeywords


class SkywardDecoratedOperator(DecoratedOperator, SkywardOperator):
    """The operator that a call of a `@task.skyward` function makes."""

    template_fields: Sequence[str] = SkywardOperator.template_fields  # pyright: ignore
    template_fields_renderers = SkywardOperator.template_fields_renderers
    shallow_copy_attrs: Sequence[str] = SkywardOperator.shallow_copy_attrs
    custom_operator_name = "@task.skyward"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any],
        op_kwargs: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        call = {"python_callable": python_callable, "op_args": op_args, "op_kwargs": op_kwargs}
        super().__init__(**call, kwargs_to_upstream=call, **kwargs)


def skyward_task(
    python_callable: Callable[..., Any] | None = None, **kwargs: Unpack[DecoratorKeywords]
) -> TaskDecorator:
    """Decorate a function to run on its own pool; takes what `SkywardOperator` takes.

        @task.skyward(accelerator="A100", image=sky.Image(pip=["torch"]))
        def train(day: str) -> float: ...

    With `map_over="candidate"`, `score(candidate=[...])` makes one call for each item, all on one pool, and returns the
    list of results; `score.expand(candidate=[...])` makes one task, and one pool, for each.
    """
    keywords: dict[str, Any] = {**kwargs}
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=keywords.pop("multiple_outputs", None),
        decorated_operator_class=SkywardDecoratedOperator,
        **keywords,
    )
