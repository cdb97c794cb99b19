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
from skyward_core.providers.runpod.api import all_pods, path_of, thing_at
from skyward_core.providers.runpod.instances import address_of, private_ip_of, state_of, word_of
from skyward_core.providers.runpod.offers import ANYWHERE, COMMUNITY, CPU_TYPE, IN_STOCK, SECURE, gpu_of

log = logging.getLogger(__name__)

ADDRESS_SECONDS = 600.0
"""How long a pod may take until it runs and has an address: loading its image is most of it."""
POLL_SECONDS = 2.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""So many times in a row neither the list nor its own address tell of a pod: it is gone."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses before the looks for what a creating call without an answer may have made; how far behind the list is, is told
nowhere.
"""


def check_stock(api: Api, offer: Offer) -> None:
    """Raise NoCapacity if there is none in stock: a creating call would say no more than that something is wrong."""
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
        raise NoCapacity(f"RunPod has no {offer.instance_type} in {offer.region} in stock").coded("NONE")


def create_pods(creating: Api, api: Api, orders: Mapping[int, Row]) -> dict[int, str]:
    """Make a pod of each order, by rank; return the ids of those that were made, or raise why there is none.

    After the first refusal no more is asked for. A call whose outcome is unknown is not repeated: its pod is looked for
    by name.
    """
    is_over = threading.Event()

    def create(order: Row) -> str | SkywardError | None:
        if is_over.is_set():
            return None
        try:
            answer = creating.ask("POST", "/v2/pods", body=order)
            if isinstance(answer, dict) and (pod := cast("Row", answer).get("id")):
                return str(pod)
            error: SkywardError = ProviderFailed("RunPod does not say what it has created")
        except SkywardError as caught:
            error = caught
        is_over.set()
        return error

    outcomes = dict(zip(orders, side_by_side(create, list(orders.values()), "skyward-runpod"), strict=True))
    made = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, str)}
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, SkywardError)}
    unsure = {
        rank: error
        for rank, error in failures.items()
        if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited)
    }
    found = _look(api, {rank: str(orders[rank]["name"]) for rank in unsure})
    for rank in failures.keys() - found.keys():
        log.info("RunPod did not make the pod of rank %d: %s", rank, failures[rank])
    if not made and not found:
        raise next(iter([*unsure.values(), *failures.values()]))
    return dict(sorted({**made, **found}.items()))


def _look(api: Api, names: Mapping[int, str]) -> dict[int, str]:
    """Return the pods of these names that the list tells of.

    If it does not answer, that is not known either, and is the same error.
    """
    found: dict[int, str] = {}
    for pause in LOOK_SECONDS if names else ():
        time.sleep(pause)
        try:
            by_name = {
                row.get("name"): str(row["id"]) for row in all_pods(api) if state_of(row) is not InstanceState.GONE
            }
        except SkywardError as error:
            log.warning("RunPod does not say what came of a creating call without an answer: %s", error)
            break
        found = {rank: by_name[name] for rank, name in names.items() if name in by_name}
        if len(found) == len(names):
            break
    return found


def await_addresses(
    api: Api, created: Mapping[int, str], offer: Offer, *, is_networked: bool
) -> tuple[dict[int, Row], dict[int, NoCapacity]]:
    """Wait until each pod runs and has an address, or never will; return what is told of the ones, and why by rank
    for the others.
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
    """Why a pod is not waited for any longer.

    The data centre of the call is a preferred one, says RunPod, and a user may have reasons to insist.
    """
    if is_gone or (row and state_of(row) in (InstanceState.STOPPING, InstanceState.GONE)):
        return NoCapacity(f"RunPod could not start {pod}: {word_of(row)}").coded(word_of(row))
    if region != ANYWHERE and (place := row.get("dataCenterId")) not in (None, region):
        return NoCapacity(f"RunPod has placed {pod} in {place} and not in {region}").coded(f"placed in {place}")
    return None
