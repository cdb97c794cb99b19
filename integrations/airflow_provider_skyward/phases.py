"""The phases of one execution: a folded group of the task log and a span for each.

    provision ──▶ bootstrap ──▶ call ──▶ release

A phase is begun and ended by the main thread. While it waits for an opening pool, the thread of the pool's events moves
on from provision to bootstrap. Spans are below that of the task, if Airflow traces.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from airflow_provider_skyward.airflow_compat import tracer

TITLES = {"provision": "Provisioning", "bootstrap": "Bootstrap", "release": "Release"}
"""The phases that are folded in the log, and the titles of their groups."""


class Phases:
    """The current phase."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._tracer = tracer()
        self._phase = ""
        self._span: Any = None
        self._parent: Any = None
        if self._tracer is not None:
            from opentelemetry import context

            self._parent = context.get_current()  # the thread of the pool's events has no context of its own

    @contextmanager
    def phase(self, name: str, **attributes: Any) -> Generator[None]:
        """Be in a phase in the block. An exception of the block is noted in its span."""
        self._begin(name, attributes)
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._end()

    def machines_are_there(self, **attributes: Any) -> None:
        """Move on to the bootstrap: all that was asked of a provider is done."""
        if self._phase == "provision":
            self._end()
            self._begin("bootstrap", attributes)

    def note(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the span of the current phase."""
        if self._span is not None:
            for name, value in attributes.items():
                self._span.set_attribute(f"skyward.{name}", value)

    def _begin(self, name: str, attributes: Mapping[str, Any]) -> None:
        self._phase = name
        if name in TITLES:
            self._log.info("::group::%s", TITLES[name])
        if self._tracer is not None:
            self._span = self._tracer.start_span(f"skyward.{name}", context=self._parent)
            self.note(attributes)

    def _end(self, error: BaseException | None = None) -> None:
        name, self._phase = self._phase, ""
        if name in TITLES:
            self._log.info("::endgroup::")
        span, self._span = self._span, None
        if span is not None:
            if error is not None:
                span.set_attribute("error.type", type(error).__name__)
            span.end()
