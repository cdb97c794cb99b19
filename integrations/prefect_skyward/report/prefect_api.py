"""The requests to Prefect's API, for one flow run: artifacts, labels and events.

Updates go past `update_artifact`, and artifacts of task runs past `create_artifact`: these emit an event each time, and
the graph of a run shows fifty events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from httpx import HTTPStatusError, codes
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactCollectionFilter,
    ArtifactCollectionFilterKey,
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.context import SyncClientContext
from prefect.events.utilities import emit_event
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

if TYPE_CHECKING:
    from prefect.client.schemas.objects import Artifact

type Page = str | float | Sequence[Mapping[str, Any]]
"""Markdown, percent, or the rows of a table."""
TAG, BETWEEN = "skyward.cost_tag", " | "
"""An artifact names the tags that were written here, so that no other one is replaced, whatever it says."""
LABEL_SECONDS, LABEL_AGAIN_SECONDS = 1.0, 0.05
"""How long labels are tried, and how often. On SQLite Prefect's server (3.7.7) reads a flow run before it writes its
labels, in one transaction: a write of anybody between the two is "database is locked", at once, and the answer is 503.
Prefect's client waits 2, 4, 8, 16 and 32 seconds before it tries again, and nothing else is written meanwhile.
"""


class RunApi:
    """Writes what belongs to one flow run. An artifact of a key is made once, also over several attempts of the run."""

    def __init__(self, flow_run_id: UUID) -> None:
        self._flow_run_id = flow_run_id
        self._ids: dict[tuple[str, str | None], UUID] = {}
        self._written: dict[tuple[str, str | None], tuple[Page, str]] = {}
        self._tag = ""
        self._tags: list[str] = []
        """Those that were written here, or are about to be."""

    def read(self, keys: Sequence[str]) -> dict[str, Any]:
        """Find artifacts of earlier attempts, so that `write` updates them. Return their data by key."""
        wanted = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]), key=ArtifactFilterKey(any_=list(keys))
        )
        with SyncClientContext.get_or_create() as context:
            found: list[Artifact] = context.client.read_artifacts(artifact_filter=wanted)
        for artifact in found:
            if artifact.key and artifact.task_run_id is None:
                self._ids[artifact.key, None] = artifact.id
                self._tags += (artifact.metadata_ or {}).get(TAG, "").split(BETWEEN)
        return {artifact.key: artifact.data for artifact in found if artifact.key and artifact.task_run_id is None}

    def write(
        self, key: str, kind: str, data: Page, description: str, task_run_id: str | None = None, *, tag: str = ""
    ) -> None:
        """Make or update an artifact, if it has changed. `tag`: of the flow run, which is to be written after it."""
        place = (key, task_run_id)
        if self._written.get(place) == (data, description):
            return
        content: dict[str, Any] = {"data": data if isinstance(data, str | float) else json.dumps(data)}
        if tag:
            self._tags = list(dict.fromkeys([*self._tags, tag]))
            content["metadata_"] = {TAG: BETWEEN.join(self._tags)}
        with SyncClientContext.get_or_create() as context:
            if (known := self._ids.get(place)) is not None:
                update = ArtifactUpdate(**content, description=description)
                context.client.request(
                    "PATCH",
                    "/artifacts/{id}",
                    json=update.model_dump(mode="json", exclude_unset=True),
                    path_params={"id": known},
                )
            else:
                artifact = ArtifactCreate(
                    key=key, type=kind, description=description, flow_run_id=self._flow_run_id, **content
                )
                self._ids[place] = (
                    context.client.create_artifact(artifact).id
                    if task_run_id is None
                    else _create_quietly(context.client, artifact, task_run_id)
                )
        self._written[place] = data, description

    def label(self, labels: Mapping[str, str | int | float | bool], seconds: float = LABEL_SECONDS) -> None:
        """Set labels of the flow run. Tries it for so many seconds."""
        until = time.monotonic() + seconds
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), SyncClientContext.get_or_create() as context:
            while True:
                try:
                    context.client.update_flow_run_labels(self._flow_run_id, dict(labels))
                except HTTPStatusError as error:
                    if error.response.status_code != codes.SERVICE_UNAVAILABLE or time.monotonic() > until:
                        raise
                    time.sleep(LABEL_AGAIN_SECONDS)
                else:
                    return

    def tag(self, text: str) -> None:
        """Give the flow run this tag in place of those that were written here before; its other tags stay. An artifact
        has the tag already: a process that is killed between the two leaves no tag of which nobody knows.
        """
        if text == self._tag:
            return
        with SyncClientContext.get_or_create() as context:
            run = context.client.read_flow_run(self._flow_run_id)
            others = [one for one in run.tags if one not in self._tags]
            context.client.update_flow_run(self._flow_run_id, tags=[*others, text])
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
            payload=dict(payload),
            id=uuid5(self._flow_run_id, name) if is_bill else None,
        )


def write_of_no_run(key: str, markdown: str, description: str) -> None:
    """Make or update the newest artifact of a key that belongs to no run, without an event."""
    wanted = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=[key]))
    with SyncClientContext.get_or_create() as context:
        client = context.client
        known = client.read_latest_artifacts(artifact_filter=wanted, limit=1)
        if known:
            update = ArtifactUpdate(data=markdown, description=description)
            path = {"id": known[0].latest_id}
            body = update.model_dump(mode="json", exclude_unset=True)
            client.request("PATCH", "/artifacts/{id}", json=body, path_params=path)
        else:
            artifact = ArtifactCreate(key=key, type="markdown", description=description, data=markdown)
            client.request("POST", "/artifacts/", json=artifact.model_dump(mode="json", exclude_unset=True))


def _create_quietly(client: Any, artifact: ArtifactCreate, task_run_id: str) -> UUID:
    """Create an artifact of a task run, without an event: there are many of them."""
    body = {**artifact.model_dump(mode="json", exclude_unset=True), "task_run_id": task_run_id}
    return UUID(client.request("POST", "/artifacts/", json=body).json()["id"])
