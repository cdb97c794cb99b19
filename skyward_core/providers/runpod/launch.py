"""One launch at RunPod: stock, creating calls, and waiting for addresses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import quote

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    NoCapacity,
    ProviderFailed,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Offer
from skyward_core.providers._http import Api, Row
from skyward_core.providers.runpod.api import CAPACITY, all_pods, path_of, thing_at
from skyward_core.providers.runpod.instances import address_of, private_ip_of, state_of, word_of
from skyward_core.providers.runpod.offers import ANYWHERE, COMMUNITY, CPU_TYPE, IN_STOCK, SECURE, gpu_of

log = logging.getLogger(__name__)

ADDRESS_SECONDS = 600.0
"""How long a pod may take until it runs and has an address, mostly to load its image."""
POLL_SECONDS = 2.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""A pod is gone when list and its own URL lack it this often in a row."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses between lookups after a creating call without an answer. RunPod does not document how late the list is."""


def check_stock(api: Api, offer: Offer) -> None:
    """Raise NoCapacity if there is none in stock. A creating call would only say that something is wrong."""
    if cpu := CPU_TYPE.fullmatch(offer.instance_type):
        path, query = f"/v2/catalog/cpus/{cpu['id']}", {"vcpuCount": int(cpu["count"])}
    else:
        gpu = gpu_of(offer)
        path, query = (
            f"/v2/catalog/gpus/{quote(gpu['id'], safe='')}",
            {"count": int(gpu["count"]), "cloud": COMMUNITY if gpu["community"] else SECURE},
        )
    row = thing_at(api, path, {**IN_STOCK, **query})
    if row is None:
        raise NoCapacity(f"RunPod sells no {offer.instance_type} any more").coded("Not Found")
    place = next((place for place in row.get("dataCenters") or [] if place["id"] == offer.region), row)
    if "NONE" in (row.get("availability"), place.get("availability")):
        others = [each["id"] for each in row.get("dataCenters") or [] if each.get("availability") != "NONE"]
        elsewhere = "" if row.get("availability") == "NONE" or not others else f"; {', '.join(others)} have it"
        raise (
            NoCapacity(f"RunPod has no {offer.instance_type} in {offer.region} in stock{elsewhere}")
            .coded("NONE")
            .advised(CAPACITY)
        )


def create_pods(creating: Api, api: Api, orders: Mapping[int, Row]) -> dict[int, str]:
    """Create a pod of each order; return their ids by rank, or raise the error if there is no pod.

    After the first refusal no further pod is requested. A call with unknown outcome is not repeated: its pod is looked
    up by name.
    """
    is_over = threading.Event()

    def create(order: Row) -> str | SkywardError | None:
        if is_over.is_set():
            return None
        try:
            answer = creating.request("POST", "/v2/pods", body=order)
            if isinstance(answer, dict) and (pod := cast("Row", answer).get("id")):
                return str(pod)
            error: SkywardError = ProviderFailed("RunPod does not say what it has created")
        except SkywardError as caught:
            error = caught
        is_over.set()
        return error

    outcomes = dict(zip(orders, side_by_side(create, list(orders.values()), "skyward-runpod"), strict=True))
    created = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, str)}
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, SkywardError)}
    unsure = {
        rank: error
        for rank, error in failures.items()
        if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited)
    }
    found = _look_up(api, {rank: str(orders[rank]["name"]) for rank in unsure})
    for rank in failures.keys() - found.keys():
        log.info("RunPod did not create the pod of rank %d: %s", rank, failures[rank])
    if not created and not found:
        raise next(iter([*unsure.values(), *failures.values()]))
    return dict(sorted({**created, **found}.items()))


def _look_up(api: Api, names: Mapping[int, str]) -> dict[int, str]:
    """Return the ids of the listed pods with these names.

    If the list fails too, the outcome remains unknown, and the first error is raised.
    """
    found: dict[int, str] = {}
    for pause in LOOK_SECONDS if names else ():
        time.sleep(pause)
        try:
            by_name = {
                row.get("name"): str(row["id"]) for row in all_pods(api) if state_of(row) is not InstanceState.GONE
            }
        except SkywardError as error:
            log.warning("RunPod does not list what an unanswered creating call has created: %s", error)
            break
        found = {rank: by_name[name] for rank, name in names.items() if name in by_name}
        if len(found) == len(names):
            break
    return found


def await_addresses(
    api: Api, created: Mapping[int, str], offer: Offer, *, is_networked: bool
) -> tuple[dict[int, Row], dict[int, NoCapacity]]:
    """Wait until each pod runs and has an address, or has failed.

    Returns the rows of the ones and the errors of the others, by rank.
    """
    waiting, up, down, missed = dict(created), dict[int, Row](), dict[int, NoCapacity](), dict.fromkeys(created, 0)
    deadline = time.monotonic() + ADDRESS_SECONDS
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS, 1.5).pauses()
    while waiting:
        rows = {row["id"]: row for row in all_pods(api)}
        is_late = time.monotonic() >= deadline
        for rank, pod in list(waiting.items()):
            row: Row = rows.get(pod) or thing_at(api, path_of(pod)) or {}
            missed[rank] = 0 if row else missed[rank] + 1
            trouble = _trouble(pod, row, offer.region, is_gone=missed[rank] >= MISSES)
            if trouble is None and _is_up(row, is_networked=is_networked):
                up[rank] = row
            elif trouble is not None or is_late:
                word = word_of(row)
                down[rank] = trouble or NoCapacity(
                    f"RunPod's {pod} has no address after {ADDRESS_SECONDS:g} s: {word}"
                ).coded(word)
            else:
                continue
            del waiting[rank]
        if waiting:
            time.sleep(next(pauses))
    return up, down


def _is_up(row: Row, *, is_networked: bool) -> bool:
    return (
        state_of(row) is InstanceState.RUNNING
        and address_of(row) is not None
        and (not is_networked or private_ip_of(row) is not None)
    )


def _trouble(pod: str, row: Row, region: str, *, is_gone: bool) -> NoCapacity | None:
    """Return why a pod cannot become usable; None if it still can.

    RunPod treats the requested data centre as a preference; users may depend on it.
    """
    if is_gone or (row and state_of(row) in (InstanceState.STOPPING, InstanceState.GONE)):
        return NoCapacity(f"RunPod could not start {pod}: {word_of(row)}").coded(word_of(row))
    if region != ANYWHERE and (place := row.get("dataCenterId")) not in (None, region):
        return NoCapacity(f"RunPod has placed {pod} in {place} and not in {region}").coded(f"placed in {place}")
    return None
