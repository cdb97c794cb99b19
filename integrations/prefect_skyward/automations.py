"""Ready automations: one cancels a run at 80 % of its budget, one notifies of it, one ends runs of dead processes.

from prefect_skyward.automations import deploy_budget_guard, deploy_budget_notification, deploy_crash_guard

deploy_budget_guard()
deploy_budget_notification("slack-webhook/alerts")
deploy_crash_guard()
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.abstract import NotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, CancelFlowRun, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

import skyward_core as sky
from prefect_skyward.report.notices import EXCEEDED, WARNING

GUARD_NAME = "Skyward: cancel a run at 80 % of its budget"
NOTIFICATION_NAME = "Skyward: notify of a run's budget"
CRASH_GUARD_NAME = "Skyward: end runs whose process has died"
HEARTBEAT = "prefect.flow-run.heartbeat"
SILENT_STATES = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended")
LEAST_SILENT_SECONDS = 10.0
SUBJECT = "Skyward: {{ flow.name }}, {{ flow_run.name }}: {{ event.event }}"
BODY = (
    "{{ event.payload.reason }}\n"
    "Spent: {{ event.payload.spent_usd }} USD of {{ event.payload.limit_usd or event.payload.account }}.\n"
    "{{ flow_run|ui_url }}"
)


def deploy_budget_guard(*, flows: Sequence[str] = (), name: str = GUARD_NAME) -> Automation:
    """Make or replace the automation that cancels a flow run when 80 % of its `max_cost` is spent, or its account has
    no more to reserve.

    `flows` are the names of the flows to which it applies; all without any. Only a run that a worker or `serve()` has
    started can be cancelled. Deploying again under the same `name` changes the automation.
    """
    description = "Cancels the run: 80 % of its max_cost is spent, or its account has no more to reserve."
    return _deploy(name, description, _trigger({WARNING}, flows), [CancelFlowRun(type="cancel-flow-run")])


def deploy_budget_notification(
    block: NotificationBlock | UUID | str,
    *,
    flows: Sequence[str] = (),
    name: str = NOTIFICATION_NAME,
    subject: str = SUBJECT,
    body: str = BODY,
) -> Automation:
    """Make or replace the automation that sends a notification when a run's money runs low, and when it is used up.

    `block` is a saved notification block of Prefect (Slack, e-mail, a webhook): the block, its id, or its
    "type-slug/name". `subject` and `body` are Jinja templates. Raises BadRequest for a block that is not saved, or that
    Prefect does not have.
    """
    action = SendNotification(type="send-notification", block_document_id=_id_of(block), subject=subject, body=body)
    description = "Sends a notification when the money of a run runs low, and when it is used up."
    return _deploy(name, description, _trigger({WARNING, EXCEEDED}, flows), [action])


def deploy_crash_guard(
    silent_seconds: float = 600.0, *, flows: Sequence[str] = (), name: str = CRASH_GUARD_NAME
) -> Automation:
    """Make or replace the automation that sets a flow run Crashed when it has sent no heartbeat for `silent_seconds`.

    A run stays Running if its process and its worker are killed. Prefect's flows send a heartbeat every
    `PREFECT_FLOWS_HEARTBEAT_FREQUENCY` seconds (180 in 3.7): choose three times as long.
    `flows` are the names of the flows to which it applies; all without any. Raises BadRequest for less than 10 seconds.
    """
    if silent_seconds < LEAST_SILENT_SECONDS:
        raise sky.BadRequest(
            f"silent_seconds={silent_seconds:g}: Prefect waits for {LEAST_SILENT_SECONDS:g} seconds or longer"
        )
    trigger = EventTrigger(
        type="event",
        after={HEARTBEAT},
        expect={HEARTBEAT, *(f"prefect.flow-run.{state}" for state in SILENT_STATES)},
        match=ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=_of_flows(flows),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=silent_seconds),
    )
    message = f"The flow run has sent no heartbeat for {silent_seconds:g} s: its process and its worker have died."
    action = ChangeFlowRunState(
        type="change-flow-run-state", name=None, state=StateType.CRASHED, message=message, force=False
    )
    return _deploy(name, f"Sets a run Crashed that is silent for {silent_seconds:g} s.", trigger, [action])


def _of_flows(flows: Sequence[str]) -> ResourceSpecification:
    related: dict[str, Any] = {"prefect.resource.role": "flow", "prefect.resource.name": [*flows]} if flows else {}
    return ResourceSpecification.model_validate(related)


def _trigger(events: set[str], flows: Sequence[str]) -> EventTrigger:
    return EventTrigger(
        type="event",
        expect=events,
        match=ResourceSpecification.model_validate({"prefect.resource.id": "skyward.pool.*"}),
        match_related=_of_flows(flows),
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def _deploy(name: str, description: str, trigger: EventTrigger, actions: Sequence[Any]) -> Automation:
    # Prefect's client leaves fields that were not set out of an update: without an explicit `type` the server takes
    # any action for "do-nothing" (3.7.7)
    core = AutomationCore(
        name=name, description=description, trigger=trigger, actions=cast("list[ActionTypes]", [*actions])
    )
    with get_client(sync_client=True) as client:
        known = next((one for one in client.read_automations_by_name(name)), None)
        if known is None:
            automation_id = client.create_automation(core)
        else:
            automation_id = known.id
            client.update_automation(automation_id, core)
    return Automation(id=automation_id, **core.model_dump())


def _id_of(block: NotificationBlock | UUID | str) -> UUID:
    if isinstance(block, UUID):
        return block
    if not isinstance(block, str):
        if (saved := cast(Any, block)._block_document_id) is None:
            raise sky.BadRequest("the notification block is not saved: call its save('a-name') first")
        return saved
    slug, slash, name = block.partition("/")
    if not slash:
        raise sky.BadRequest(f"block={block!r}: write its type's slug and its name, as in 'slack-webhook/alerts'")
    try:
        with get_client(sync_client=True) as client:
            return client.read_block_document_by_name(name, slug).id
    except ObjectNotFound as error:
        raise sky.BadRequest(
            f"block={block!r}: Prefect has no block of this type and name. Make it in the UI (Blocks), or save one; the"
            " command `prefect block ls` lists those that there are"
        ) from error
