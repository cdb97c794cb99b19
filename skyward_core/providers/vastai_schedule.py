"""Ends that Vast.ai carries out itself: jobs of its scheduler that destroy containers (`VastAI(schedule_end=True)`).

A container that Vast.ai has stopped (outbid, or the credit is used up) runs nothing, so it cannot end itself. If the
client and its reaper are gone too, its disk is billed until a sweep. A job of the scheduler needs neither.

    container created -> job created -> the container runs -> ended by the pool -> job removed
         `launch`         `schedule`                            `terminate`        `unschedule`

Killed between the first two: the container has no job, and ends as without the setting. Killed before the last one: the
job asks for the end of a container that does not exist, every hour for WEEK_SECONDS, and then ends.

Facts: Vast's own command line creates such jobs with any path and method (vast-ai/vast-cli, `add_scheduled_job`).
Creation, listing and removal: vast-ai/docs, api-reference/openapi/yaml, auto_post_ and
auto_get_api_v0_commands_schedule_job_5b98f5.yaml at commit 82a1f272, auto_delete_..._schedule_job_id_a3129a.yaml at
commit 633d4790. No document says that DELETE of a container is accepted. One user reports that it is, and that a job
runs at minute 0 of every hour, from the hour that contains its start (2026-10-03). We have not tested it on the real
market.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, cast

from skyward_core.errors import BadRequest, ProviderFailed
from skyward_core.providers._http import Api, Row

JOBS = "/api/v0/commands/schedule_job/"
EXISTS = "job_exists"
"""The code of the refusal of a second job that is the same (422, by the schema)."""
HOUR_SECONDS, WEEK_SECONDS = 3600, 7 * 24 * 3600
PAST_THE_HOUR_SECONDS = 60
"""The start of a job is in the hour in which it first runs, and not at its border."""


def first_run(expires: float) -> float:
    """Return the first full hour at or after a time, in seconds since 1970: when the job runs first.

    >>> first_run(7200), first_run(7201)
    (7200, 10800)
    """
    return math.ceil(expires / HOUR_SECONDS) * HOUR_SECONDS


def schedule(api: Api, contract: int, expires: float) -> None:
    """Have Vast.ai destroy a container at `first_run(expires)`, and every hour after it. Raises SkywardError."""
    start = first_run(expires) + PAST_THE_HOUR_SECONDS
    body = {
        "start_time": start,
        "end_time": start + WEEK_SECONDS,
        "api_endpoint": path_of(contract),
        "request_method": "DELETE",
        "request_body": {},
        "day_of_the_week": None,
        "hour_of_the_day": None,
        "frequency": "HOURLY",
        "instance_id": contract,
    }
    try:
        answer = api.request("POST", JOBS, body=body, is_repeatable=True)
    except BadRequest as error:
        if error.code == EXISTS:  # the request was repeated: the answer to the first one was lost
            return
        raise
    if not (isinstance(answer, dict) and cast("Row", answer).get("success")):
        words = cast("Row", answer) if isinstance(answer, dict) else {}
        raise ProviderFailed(
            f"Vast.ai did not schedule the end of {contract}: {words.get('error')}: {words.get('msg')}"
        )


def unschedule(api: Api, contracts: Collection[int]) -> None:
    """Remove the jobs that would destroy these containers. Raises SkywardError."""
    paths = {path_of(contract) for contract in contracts}
    for job in _jobs(api.request("GET", JOBS)):
        if (
            job.get("api_endpoint") in paths
            and job.get("request_method") == "DELETE"
            and isinstance(job.get("id"), int)
        ):
            api.request("DELETE", f"{JOBS}{job['id']}/", missing_is_none=True)


def path_of(contract: int) -> str:
    """Return the path whose DELETE destroys a container."""
    return f"/api/v0/instances/{contract}/"


def _jobs(answer: Any) -> list[Row]:
    """Return the rows of a listing, which is an array by the schema, and was seen within an object."""
    rows: Any = cast("Row", answer).get("results") if isinstance(answer, dict) else answer
    if not isinstance(rows, list):
        raise ProviderFailed(f"Vast.ai answered GET {JOBS} without a list of jobs")
    return [row for row in cast("list[Any]", rows) if isinstance(row, dict)]
