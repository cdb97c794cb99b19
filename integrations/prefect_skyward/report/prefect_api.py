"""The requests to Prefect's API, for one flow run: artifacts, labels and events.

Updates go past `update_artifact`, and artifacts of task runs past `create_artifact`: these emit an event each time, and
the graph of a run shows fifty events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from httpx import HTTPStatusError, TransportError, codes
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactCollectionFilter,
    ArtifactCollectionFilterKey,
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.context import SettingsContext, SyncClientContext, get_settings_context
from prefect.events.utilities import emit_event

import skyward_core as sky

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact

COST_KEY = "skyward-cost"
"""The artifact with a flow run's cost. Its metadata has the figures of the labels, which a busy server may refuse."""
type Page = str | float | Sequence[Mapping[str, Any]]
"""Markdown, percent, or the rows of a table."""
TAG, BETWEEN = "skyward.cost_tag", " | "
"""An artifact names the tags that were written here, so that no other one is replaced, whatever it says."""
ASK_SECONDS, AGAIN_SECONDS, AWAY_SECONDS, LONGER = 10.0, 0.05, 1.0, 1.5
"""How long a request is tried; the first pause if the server is busy, and the longest one, also if it does not answer;
how much longer each pause is than the one before.

Prefect's client would wait 2, 4, 8, 16 and 32 seconds, and nothing else would be written meanwhile. On SQLite Prefect's
server (3.7.7) is busy for moments only: if another request writes between what it reads and what it writes in one
transaction, the answer is "database is locked" (503) at once.
"""
LABEL_SECONDS = 1.0
"""How long labels are tried that the next write repeats."""
FORBIDDEN = int(codes.FORBIDDEN)
BUSY = frozenset({codes.REQUEST_TIMEOUT, codes.TOO_MANY_REQUESTS, codes.BAD_GATEWAY, codes.SERVICE_UNAVAILABLE})


def asked[T](ask: Callable[[SyncPrefectClient], T], seconds: float = ASK_SECONDS) -> T:
    """Return what Prefect's API answers; ask again for so many seconds if it is busy or away. A request without an
    answer ends by the timeout of Prefect's client. Raises httpx.HTTPError.
    """
    until, pause = time.monotonic() + seconds, AGAIN_SECONDS
    with _no_retries(), SyncClientContext.get_or_create() as context:
        while True:
            try:
                return ask(context.client)
            except (HTTPStatusError, TransportError) as error:
                wait = _seconds_before_next(error, pause)
                if wait is None or time.monotonic() + wait > until:
                    raise
            time.sleep(wait)
            pause = min(LONGER * pause, AWAY_SECONDS)


def _no_retries() -> SettingsContext:
    """Return settings without retries of Prefect's client. `temporary_settings` would validate all settings, in 75 ms
    for each request.
    """
    context = get_settings_context()
    client = context.settings.client.model_copy(update={"max_retries": 0})
    return SettingsContext(profile=context.profile, settings=context.settings.model_copy(update={"client": client}))


def _seconds_before_next(error: HTTPStatusError | TransportError, pause: float) -> float | None:
    """Return how long to wait before a request is sent again; None: the next answer would be the same. `pause`: at
    least, if the server is busy.
    """
    if isinstance(error, TransportError):
        return AWAY_SECONDS
    answer = error.response
    if answer.status_code == FORBIDDEN and "Invalid CSRF token" in answer.text:
        return 0.0  # Prefect's client asks for another one
    if answer.status_code not in BUSY:
        return None
    try:
        return max(pause, float(answer.headers["Retry-After"]))
    except (KeyError, ValueError):
        return pause


class RunApi:
    """Writes what belongs to one flow run. An artifact of a key is made once, also over several attempts of the run."""

    def __init__(self, flow_run_id: UUID) -> None:
        self._flow_run_id = flow_run_id
        self._ids: dict[tuple[str, str | None], UUID] = {}
        self._written: dict[tuple[str, str | None], tuple[Page, str, Mapping[str, str]]] = {}
        self._tag = ""
        self._tags: list[str] = []
        """Those that were written here, or are about to be."""

    def read(self, keys: Sequence[str]) -> dict[str, Any]:
        """Find artifacts of earlier attempts, so that `write` updates them. Return their data by key."""
        wanted = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]), key=ArtifactFilterKey(any_=list(keys))
        )
        found: list[Artifact] = asked(lambda client: client.read_artifacts(artifact_filter=wanted))
        for artifact in found:
            if artifact.key and artifact.task_run_id is None:
                self._ids[artifact.key, None] = artifact.id
                self._tags += (artifact.metadata_ or {}).get(TAG, "").split(BETWEEN)
        return {artifact.key: artifact.data for artifact in found if artifact.key and artifact.task_run_id is None}

    def write(
        self,
        key: str,
        kind: str,
        data: Page,
        description: str,
        task_run_id: str | None = None,
        *,
        tag: str = "",
        figures: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make or update an artifact, if it has changed. `tag`: of the flow run, which is to be written after it;
        `figures`: of its metadata.
        """
        data, description = sky.shown_text.visible_data(data), sky.shown_text.visible_lines(description)
        place = (key, task_run_id)
        if self._written.get(place) == (data, description, figures):
            return
        content: dict[str, Any] = {"data": data if isinstance(data, str | float) else json.dumps(data)}
        if tag:
            self._tags = list(dict.fromkeys([*self._tags, tag]))
            content["metadata_"] = {TAG: BETWEEN.join(self._tags), **figures}
        if (known := self._ids.get(place)) is not None:
            update = ArtifactUpdate(**content, description=description)
            asked(partial(_update_quietly, artifact_id=known, update=update))
        else:
            artifact = ArtifactCreate(
                key=key, type=kind, description=description, flow_run_id=self._flow_run_id, **content
            )
            self._ids[place] = asked(partial(_create_once, artifact, task_run_id, []))
        self._written[place] = data, description, figures

    def label(self, labels: Mapping[str, str | int | float | bool], seconds: float = ASK_SECONDS) -> None:
        """Set labels of the flow run. Tries it for so many seconds."""
        shown = sky.shown_text.visible_data(dict(labels))
        asked(lambda client: client.update_flow_run_labels(self._flow_run_id, shown), seconds)

    def tag(self, text: str) -> None:
        """Give the flow run this tag in place of those that were written here before; its other tags stay. An artifact
        has the tag already: a process that is killed between the two leaves no tag of which nobody knows.
        """
        if text == self._tag:
            return
        run = asked(lambda client: client.read_flow_run(self._flow_run_id))
        others = [one for one in run.tags if one not in self._tags]
        asked(lambda client: client.update_flow_run(self._flow_run_id, tags=[*others, text]))
        self._tag, self._tags = text, [text]

    def emit(
        self,
        event: str,
        pool_id: str,
        pool_name: str,
        payload: Mapping[str, Any],
        *,
        related: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Emit an event of a pool. Prefect adds the flow, the deployment and the tags of the run around this thread.

        A bill has an id that its amount decides: Prefect keeps one event of each id, and so of each bill.
        """
        pool_name, payload = sky.shown_text.visible(pool_name), sky.shown_text.visible_data(dict(payload))
        is_bill = "usd" in payload
        name = f"{event}/{pool_id}/{payload['usd']:.6f}" if is_bill else ""
        emit_event(
            event,
            resource={
                "prefect.resource.id": f"skyward.pool.{pool_id or 'none'}",
                "prefect.resource.name": pool_name or pool_id or "no pool",
                "skyward.pool_id": pool_id,
            },
            related=[
                {
                    "prefect.resource.id": f"prefect.flow-run.{self._flow_run_id}",
                    "prefect.resource.role": "flow-run",
                },
                *map(dict, related),
            ],
            payload=payload,
            id=uuid5(self._flow_run_id, name) if is_bill else None,
        )


def figures_of(flow_run_ids: Sequence[UUID]) -> dict[UUID, Mapping[str, str]]:
    """Return the figures of the cost artifacts of flow runs that have one; of several, those of the last change."""
    if not flow_run_ids:
        return {}
    wanted = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=list(flow_run_ids)), key=ArtifactFilterKey(any_=[COST_KEY])
    )
    found: list[Artifact] = asked(lambda client: client.read_artifacts(artifact_filter=wanted))
    changed = sorted(found, key=lambda one: one.updated or datetime.min.replace(tzinfo=UTC))
    return {one.flow_run_id: one.metadata_ or {} for one in changed if one.flow_run_id is not None}


def write_of_no_run(key: str, markdown: str, description: str) -> None:
    """Make or update the newest artifact of a key that belongs to no run, without an event."""
    markdown, description = sky.shown_text.visible_lines(markdown), sky.shown_text.visible_lines(description)
    wanted = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=[key]))
    known = asked(lambda client: client.read_latest_artifacts(artifact_filter=wanted, limit=1))
    if known:
        update = ArtifactUpdate(data=markdown, description=description)
        asked(partial(_update_quietly, artifact_id=known[0].latest_id, update=update))
    else:
        artifact = ArtifactCreate(key=key, type="markdown", description=description, data=markdown)
        body = artifact.model_dump(mode="json", exclude_unset=True)
        asked(lambda client: client.request("POST", "/artifacts/", json=body))


def _update_quietly(client: SyncPrefectClient, artifact_id: UUID, update: ArtifactUpdate) -> None:
    """Update an artifact, without an event."""
    body = update.model_dump(mode="json", exclude_unset=True)
    client.request("PATCH", "/artifacts/{id}", json=body, path_params={"id": artifact_id})


def _create_once(
    artifact: ArtifactCreate, task_run_id: str | None, unanswered: list[TransportError], client: SyncPrefectClient
) -> UUID:
    """Create an artifact, unless an earlier try has: the server may have made it, and its answer was lost."""
    if unanswered and (made := _made_before(client, artifact, task_run_id)) is not None:
        return made
    try:
        if task_run_id is None:
            return client.create_artifact(artifact).id
        # without an event: there are many of them
        body = {**artifact.model_dump(mode="json", exclude_unset=True), "task_run_id": task_run_id}
        return UUID(client.request("POST", "/artifacts/", json=body).json()["id"])
    except TransportError as error:
        unanswered.append(error)
        raise


def _made_before(client: SyncPrefectClient, artifact: ArtifactCreate, task_run_id: str | None) -> UUID | None:
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[artifact.key or ""]))
    wanted.flow_run_id = ArtifactFilterFlowRunId(any_=[artifact.flow_run_id] if artifact.flow_run_id else None)
    found = client.read_artifacts(artifact_filter=wanted)
    return next((one.id for one in found if task_run_id == (one.task_run_id and str(one.task_run_id))), None)
