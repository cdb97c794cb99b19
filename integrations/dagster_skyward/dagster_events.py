"""Events that we write into the log of a run. The only module that uses Dagster's internal classes of events."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster._core.events import AssetObservationData, DagsterEvent, EngineEventData
from dagster._utils.error import serializable_error_info_from_exc_info
from dagster_shared.error import SerializableErrorInfo

import skyward_core as sky
from dagster_skyward.metadata import shown


def report_observation(
    instance: dg.DagsterInstance, run: dg.DagsterRun, step: str, observation: dg.AssetObservation, message: str
) -> None:
    """Write an observation into the log of a run, as if the step had made it. The run may have ended."""
    event = DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_OBSERVATION.value,
        job_name=run.job_name,
        step_key=step or None,
        event_specific_data=AssetObservationData(observation),
        message=message,
    )
    instance.report_dagster_event(event, run.run_id)


def report_note(
    instance: dg.DagsterInstance, run: dg.DagsterRun, step: str, message: str, metadata: Mapping[str, Any]
) -> None:
    """Write an engine event with metadata into the log of a run. Without a step it is the run's."""
    instance.report_engine_event(
        sky.shown_text.visible_lines(message), run, EngineEventData(metadata=shown(metadata)), step_key=step or None
    )


def report_span(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    step: str,
    message: str,
    *,
    start: str | None = None,
    end: str | None = None,
) -> None:
    """Write the begin or the end of a span of the Gantt chart. Without a step it is the run's."""
    data = EngineEventData(marker_start=start, marker_end=end)
    instance.report_engine_event(sky.shown_text.visible_lines(message), run, data, step_key=step or None)


def report_error(
    instance: dg.DagsterInstance, run: dg.DagsterRun, step: str, message: str, error: BaseException | None = None
) -> None:
    """Write an error as an engine event: its class, its message and its cause can be read by programs."""
    info = (
        SerializableErrorInfo(message, [], "skyward_core.Error")
        if error is None or error.__traceback__ is None
        else serializable_error_info_from_exc_info((type(error), error, error.__traceback__))
    )
    data = EngineEventData.engine_error(_visible_error(info))
    instance.report_engine_event(sky.shown_text.visible_lines(message), run, data, step_key=step or None)


def _visible_error(info: SerializableErrorInfo) -> SerializableErrorInfo:
    """Return an error and its causes as visible text: one of a node or a provider may be among them."""
    visible = sky.shown_text.visible_lines
    return SerializableErrorInfo(
        visible(info.message),
        list(map(visible, info.stack)),
        None if info.cls_name is None else sky.shown_text.visible(info.cls_name),
        cause=_visible_error(info.cause) if info.cause is not None else None,
        context=_visible_error(info.context) if info.context is not None else None,
    )
