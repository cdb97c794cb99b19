"""A real `dagster dev`, web server and daemon, in a separate process, driven by GraphQL."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagster_skyward.metadata import COST_USD, OTHER_COST_USD
from skyward_core.ledger.ledger import Ledger
from skyward_core.worker.node_clocks import INSTANCE_TAG, POOL_TAG, tagged_processes
from tests.ports import free_port
from tests.waiting import wait_until

CONFIG = """
telemetry: {enabled: false}
nux: {enabled: false}
run_monitoring: {enabled: true, poll_interval_seconds: 2, start_timeout_seconds: 180}
run_retries: {enabled: true, max_retries: 0}
code_servers: {local_startup_timeout: 600}
"""
ENDED = {"SUCCESS", "FAILURE", "CANCELED"}

LAUNCH = """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
TERMINATE = """mutation ($run: String!, $policy: TerminateRunPolicy) { terminateRun(runId: $run, terminatePolicy: $policy) {
  __typename ... on TerminateRunFailure { message } ... on PythonError { message } } }"""
RUN = """query ($run: ID!) { runOrError(runId: $run) { ... on Run { status parentRunId tags { key value } } } }"""
RUNS = """query { runsOrError { ... on Runs { results { runId jobName status parentRunId tags { key value } } } } }"""
EVENTS = """query ($run: ID!, $cursor: String) { logsForRun(runId: $run, afterCursor: $cursor) { ... on EventConnection {
  cursor hasMore events {
    __typename ... on MessageEvent { message stepKey level eventType }
    ... on MaterializationEvent { assetKey { path } metadataEntries { ...Entry } }
    ... on ObservationEvent { assetKey { path } metadataEntries { ...Entry } }
    ... on EngineEvent { metadataEntries { ...Entry } } } } } }
"""
ENTRY = """
fragment Entry on MetadataEntry { __typename label
  ... on FloatMetadataEntry { floatValue } ... on IntMetadataEntry { intValue } ... on TextMetadataEntry { text }
  ... on MarkdownMetadataEntry { mdStr } ... on JsonMetadataEntry { jsonString } ... on UrlMetadataEntry { url }
  ... on TableMetadataEntry { table { records } } }"""
BACKFILL = """mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
CAPTURED = """query ($run: ID!) { logsForRun(runId: $run) { ... on EventConnection { events {
  ... on LogsCapturedEvent { fileKey stepKeys } } } } }"""
OUTPUT = """query ($key: [String!]!) { capturedLogs(logKey: $key) { stdout stderr } }"""
OBSERVATIONS = """query ($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset {
  assetObservations(limit: 100) { metadataEntries { ...Entry } } } } }"""
LOCATIONS = """query { workspaceOrError { ... on Workspace { locationEntries { name loadStatus locationOrLoadError {
  __typename ... on PythonError { message } } } } } }"""


@dataclass
class Run:
    """One run of the server."""

    server: "DagsterServer"
    id: str
    _events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _cursor: str | None = None

    @property
    def status(self) -> str:
        return self.server.ask(RUN, run=self.id)["runOrError"]["status"]

    @property
    def tags(self) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in self.server.ask(RUN, run=self.id)["runOrError"]["tags"]}

    def events(self) -> list[dict[str, Any]]:
        """All events so far; each is asked for once."""
        has_more = True
        while has_more:
            found = self.server.ask(EVENTS + ENTRY, run=self.id, cursor=self._cursor)["logsForRun"]
            self._events += found["events"]
            self._cursor, has_more = found["cursor"], found["hasMore"]
        return self._events

    def output(self, step: str) -> dict[str, str]:
        """What the tabs stdout and stderr show of a step; of all its tries."""
        found = {"stdout": "", "stderr": ""}
        for event in self.server.ask(CAPTURED, run=self.id)["logsForRun"]["events"]:
            if step in (event.get("stepKeys") or ()):
                its = self.server.ask(OUTPUT, key=[self.id, "compute_logs", event["fileKey"]])["capturedLogs"]
                found = {name: text + (its[name] or "") for name, text in found.items()}
        return found

    def await_end(self) -> str:
        try:
            wait_until(lambda: self.status in ENDED, f"the end of {self.id}", 300)
        except TimeoutError as error:
            error.add_note(f"It is {self.status}, and its log ends in {self.last()}")
            raise
        return self.status

    def last(self) -> list[str]:
        return [event["message"][:200] for event in self.events()[-6:] if event["message"]]

    def terminate(self, *, force: bool = False) -> None:
        policy = "MARK_AS_CANCELED_IMMEDIATELY" if force else "SAFE_TERMINATE"

        def accepted() -> bool:  # refused while the run's process starts
            answer = self.server.ask(TERMINATE, run=self.id, policy=policy)["terminateRun"]
            return answer["__typename"] == "TerminateRunSuccess"

        wait_until(accepted, f"the server to terminate {self.id}")


@dataclass
class DagsterServer:
    """`folder` is DAGSTER_HOME, with the ledger of its runs, and has the definitions."""

    folder: Path
    url: str
    process: subprocess.Popen[bytes]

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        assert "errors" not in found, found["errors"]
        return found["data"]

    def launch(self, job: str, **tags: str) -> Run:
        params = {
            "selector": {
                "repositoryLocationName": "definitions.py",
                "repositoryName": "__repository__",
                "jobName": job,
            },
            "runConfigData": {},
            "executionMetadata": {"tags": [{"key": name, "value": value} for name, value in tags.items()]},
        }
        answer = self.ask(LAUNCH, params=params)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return Run(self, answer["run"]["runId"])

    def backfill(self, asset: str, partitions: list[str]) -> str:
        """Launch a backfill, and return its id."""
        params = {"assetSelection": [{"path": [asset]}], "partitionNames": partitions}
        answer = self.ask(BACKFILL, params=params)["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return answer["backfillId"]

    def runs(self, job: str) -> list[dict[str, Any]]:
        """All runs of a job, newest first."""
        found = self.ask(RUNS)["runsOrError"]["results"]
        return [one for one in found if one["jobName"] == job]

    def runs_with(self, tag: str, value: str) -> list[Run]:
        """All runs with a tag, newest first."""
        found = self.ask(RUNS)["runsOrError"]["results"]
        return [Run(self, one["runId"]) for one in found if {"key": tag, "value": value} in one["tags"]]

    def observations(self, *asset: str) -> list[dict[str, Any]]:
        """The metadata of the observations of an asset, newest first; none if Dagster does not know it."""
        found = self.ask(OBSERVATIONS + ENTRY, key={"path": asset})["assetOrError"]
        return [metadata_of(one) for one in found.get("assetObservations", ())]

    def pools(self, run: Run) -> list[str]:
        """The ids of the pools that belong to a run."""
        return self.pools_for(run.id)

    def pools_for(self, run: str) -> list[str]:
        """The ids of the pools that belong to a run of this id, or to the backfill; "": to nobody."""
        with Ledger(f"sqlite:///{self.folder}/ledger.db") as ledger:
            return [entry.id for entry in ledger.pools(include_ended=True) if entry.work.run == run]

    def rentals(self, pool: str) -> int:
        """How many machines a pool has asked for."""
        with Ledger(f"sqlite:///{self.folder}/ledger.db") as ledger:
            return len(ledger.intents(pool_id=pool))

    def machines(self, run: Run) -> set[str]:
        """The local nodes of these pools of which a process lives."""
        pools = self.pools(run)
        return {environ[INSTANCE_TAG] for _, environ in tagged_processes() if environ.get(POOL_TAG) in pools}


@contextlib.contextmanager
def served(folder: Path, definitions: str, **environ: str) -> Iterator[DagsterServer]:
    """Start a server with these definitions, and end it with all its processes."""
    (folder / "dagster.yaml").write_text(CONFIG)
    (folder / "definitions.py").write_text(definitions)
    port = free_port()
    command = [sys.executable, "-m", "dagster", "dev", "-f", "definitions.py", "-h", "127.0.0.1", "-p", str(port)]
    settings = {
        "DAGSTER_HOME": str(folder),
        "SKYWARD_LEDGER": f"sqlite:///{folder}/ledger.db",
        "DAGSTER_GRPC_TIMEOUT_SECONDS": "600",  # runs begin at once: the code server may start one for a minute
        **environ,
    }
    with (folder / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
        )
    server = DagsterServer(folder, f"http://127.0.0.1:{port}", process)
    try:
        wait_until(lambda: _is_ready(server), "dagster dev", 600)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ready(server: DagsterServer) -> bool:
    assert server.process.poll() is None, (server.folder / "dev.log").read_text()[-3000:]
    try:
        entries = server.ask(LOCATIONS)["workspaceOrError"]["locationEntries"]
    except (OSError, AssertionError):
        return False
    for entry in entries:
        error = entry["locationOrLoadError"]
        assert not (error and error["__typename"] == "PythonError"), error
    return bool(entries) and all(entry["loadStatus"] == "LOADED" for entry in entries)


def metadata_of(event: dict[str, Any]) -> dict[str, Any]:
    return {entry["label"]: entry for entry in event["metadataEntries"]}


def costs_in_events(instance: Any, run_id: str) -> dict[str, int]:
    """Return the micro-dollars in the materializations, observations and engine events of a run, by step; "" has what
    is for the run.
    """
    costs: dict[str, int] = {}
    for record in instance.get_records_for_run(run_id).records:
        event = record.event_log_entry.dagster_event
        match event.event_type_value if event is not None else "":
            case "ASSET_MATERIALIZATION":
                usd = event.step_materialization_data.materialization.metadata.get(COST_USD)
            case "ASSET_OBSERVATION":
                usd = event.asset_observation_data.asset_observation.metadata.get(OTHER_COST_USD)
            case "ENGINE_EVENT" if event.event_specific_data is not None:
                usd = event.event_specific_data.metadata.get(OTHER_COST_USD)
            case _:
                usd = None
        if usd is not None:
            costs[event.step_key or ""] = costs.get(event.step_key or "", 0) + round(usd.value * 1_000_000)
    return costs
