"""Spot machines of EC2: one EC2 Fleet of type `instant` over all spot pools that cost at most the offered price.

A spot pool is a type in a zone. EC2 chooses one by capacity and price (`price-capacity-optimized`). All machines of a
launch have one type and one zone and exist at once, or there are none. A fleet needs launch templates, which cost
nothing:

| step | what exists | if the client is killed after it |
| --- | --- | --- |
| templates are created, with the pool's tags | templates | `prune_launches` deletes them when they are an hour old |
| the fleet is requested, with a token | templates; perhaps machines with tags | reaper and sweep find them by tags |
| the answer arrives | templates, machines or none | the same |
| templates are deleted after any answer | machines or none | the same |
| each machine gets tags with its place and price (`settled`) | machines | they count at the offered price |

The fleet itself is a record without cost, which AWS deletes by itself. Nothing reads it later.

The name of a template is made from its content and the token of the launch. The token of the fleet is made from all
parameters. So the same launch makes the same call again. If an answer is lost, the call is sent again with the same
token. An answer without machines is final; a new try has another token.

No `MaxPrice` is set: with the present price as a limit, EC2 would take a machine back at the first rise (fact sheet,
1.4: leave it out). The spot pools are those that cost at most the offered price, by prices read a moment before.

"Fact sheet" is the one of 2026-11-20.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
)
from skyward_core.providers.aws_account import COMING, AwsAccount, each, number, pairs_of, state_of, tags_of, terminated
from skyward_core.providers.aws_launch import AGAIN_SECONDS, PRICE_TAG, template_deleted
from skyward_core.providers.base import LAUNCH_TAG, Tags
from skyward_core.shown_text import visible_logger

CALL_TAG = "skyward-call"
"""Token of a machine's fleet. EC2 does not report it, and a launch may have requested other machines too."""
PLACE_TAG = "skyward-place"
"""The machine's place in its launch, from 0 on, if another machine has the same `AmiLaunchIndex`."""

UNTRIED = ("UnfulfillableCapacity", "Failed to fulfill capacity. Please review errors in the response.")
"""What EC2 reports for a spot pool that it has not tried, because another one has failed (fact sheet, 1.4)."""
OUTAGE = re.compile(r"Internal|Unavailable|ServiceUnavailable|ServerInternal")
"""Error codes that mean an outage. A fleet's errors have no HTTP status that would show it."""
WORST_FIRST: Sequence[type[SkywardError]] = (
    QuotaExceeded,
    CredentialsError,
    RateLimited,
    NoCapacity,
    ProviderFailed,
    BadRequest,
)
"""Which of several pools' errors is raised: first those that hold for all pools, then those that a retry may cure."""
FLEET_ONLY, LAUNCH_ONLY = ("instance", "volume"), ("network-interface",)
"""Resources that an instant fleet tags by its own parameters, and those that only its template can tag.

No resource is in both: one list of tags would replace the other.
"""

log = visible_logger(__name__)


@dataclass(frozen=True, slots=True)
class SpotPool:
    """A spot pool: a type in the zone of a subnet.

    `parameters` are those of RunInstances, without type, subnet, market, number and tags.
    """

    instance_type: str
    zone: str
    subnet_id: str
    parameters: Mapping[str, Any]


def launched(
    account: AwsAccount,
    region: str,
    pools: Sequence[SpotPool],
    count: int,
    tags: Tags,
    tagging: Sequence[Mapping[str, Any]],
) -> tuple[list[str], str]:
    """Rent `count` machines in one of these pools; return their ids, and their zone ("" if EC2 does not report it).

    `tagging` has the form of RunInstances. Raises NoCapacity if no pool has them all; then no machine is left, except
    some that are terminating.
    """
    market = [[pool.instance_type, pool.zone, pool.subnet_id, pool.parameters] for pool in pools]
    call = _digest([tags[LAUNCH_TAG], region, count, market])
    in_template = [spec for spec in tagging if spec["ResourceType"] in LAUNCH_ONLY]
    data = [_data(pool.parameters, in_template) for pool in pools]
    names = [f"skyward-{_digest([tags[LAUNCH_TAG], one])[:40]}" for one in data]
    with _templates(account, region, dict(zip(names, data, strict=True)), tags):
        return _requested(account, region, _fleet(pools, names, count, tagging, call), pools, call)


def _data(parameters: Mapping[str, Any], tagging: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return parameters of RunInstances in the form of a template, in which user data is base64."""
    return {
        **parameters,
        "UserData": base64.b64encode(parameters["UserData"]).decode(),
        "TagSpecifications": list(tagging),
    }


def _fleet(
    pools: Sequence[SpotPool], names: Sequence[str], count: int, tagging: Sequence[Mapping[str, Any]], call: str
) -> dict[str, Any]:
    configs: dict[str, list[dict[str, Any]]] = {}
    for pool, name in zip(pools, names, strict=True):
        configs.setdefault(name, []).append({"InstanceType": pool.instance_type, "SubnetId": pool.subnet_id})
    return {
        "Type": "instant",
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": {"LaunchTemplateName": name, "Version": "$Latest"}, "Overrides": overrides}
            for name, overrides in configs.items()
        ],
        "TargetCapacitySpecification": {"TotalTargetCapacity": count, "DefaultTargetCapacityType": "spot"},
        "SpotOptions": {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
            "SingleInstanceType": True,
            "SingleAvailabilityZone": True,
            # all or none; it works only with one of the two settings above (fact sheet, 1.4)
            "MinTargetCapacity": count,
        },
        "TagSpecifications": [
            {**spec, "Tags": [*spec["Tags"], *pairs_of({CALL_TAG: call})]}
            for spec in tagging
            if spec["ResourceType"] in FLEET_ONLY
        ],
    }


@contextmanager
def _templates(
    account: AwsAccount, region: str, wanted: Mapping[str, Mapping[str, Any]], tags: Tags
) -> Generator[None]:
    """Create launch templates, and delete them at exit.

    A template that exists already is from the same launch and has the same content.
    """

    def make(name: str) -> None:
        try:
            account.ask(
                region,
                "ec2",
                "create_launch_template",
                LaunchTemplateName=name,
                LaunchTemplateData=wanted[name],
                ClientToken=_digest(name),
                TagSpecifications=[{"ResourceType": "launch-template", "Tags": pairs_of(tags)}],
            )
        except BadRequest as error:
            if not error.code.startswith("InvalidLaunchTemplateName.AlreadyExists"):
                raise

    def delete(name: str) -> None:
        try:
            template_deleted(account, region, name)
        except SkywardError as error:
            log.warning("launch template %s is left in %s, and deleted later: %s", name, region, error)

    try:
        each(list(wanted), make)
        yield
    finally:
        each(list(wanted), delete)


def _requested(
    account: AwsAccount, region: str, parameters: Mapping[str, Any], pools: Sequence[SpotPool], call: str
) -> tuple[list[str], str]:
    """Request the fleet until an answer is final.

    The answer may report throttling. Then nothing was created, and the request is repeated.
    """
    count = parameters["TargetCapacitySpecification"]["TotalTargetCapacity"]
    for turn, pause in enumerate((*AGAIN_SECONDS, None)):
        answer = _answer(account, region, parameters, _digest([call, turn]))
        if answer is None:
            return _found(account, region, call, count), ""
        got = answer.get("Instances", [])
        ids = [machine_id for one in got for machine_id in one.get("InstanceIds", [])]
        if len(ids) >= count:
            return ids, _zone(got[0], pools)
        error = _why_none(account, answer.get("Errors", []), pools, f"{count} x {_types(pools)} in {region} as spot")
        if ids:
            _terminate_partial(account, region, ids, count)
            raise NoCapacity(f"only {len(ids)} of {count} machines were created, and are terminated: {error}").coded(
                error.code or UNTRIED[0]
            ) from error
        if pause is None or not isinstance(error, RateLimited):
            raise error
        time.sleep(pause)
    raise AssertionError  # the last pass returns or raises


def _answer(account: AwsAccount, region: str, parameters: Mapping[str, Any], token: str) -> Mapping[str, Any] | None:
    """Send the creating call, again with its token while its outcome is unknown; return None if it stays unknown."""
    for pause in (*AGAIN_SECONDS, None):
        try:
            return account.ask(region, "ec2", "create_fleet", once=True, ClientToken=token, **parameters)
        except ProviderFailed as error:
            if pause is None:
                log.warning("%s; machines that it may have created are looked for", error)
                return None
            time.sleep(pause)
    raise AssertionError  # the last pass returns


def _found(account: AwsAccount, region: str, call: str, count: int) -> list[str]:
    listed = account.machines(region, {"Name": f"tag:{CALL_TAG}", "Values": [call]})
    ids = [machine["InstanceId"] for machine in listed if state_of(machine) in COMING]
    if len(ids) < count:
        raise ProviderFailed(
            f"AWS did not answer ec2 create_fleet in {region}; {len(ids)} of {count} machines are listed so far"
        )
    return ids


def _terminate_partial(account: AwsAccount, region: str, ids: Sequence[str], count: int) -> None:
    """Terminate machines of an incomplete fleet.

    Raises ProviderFailed if that fails. Then the sweep finds and terminates them by their tags.
    """
    _, left = terminated(account, region, ids)
    if left:
        error = next(iter(left.values()))
        raise ProviderFailed(
            f"only {len(ids)} of {count} machines were created, and {', '.join(sorted(left))} could not be terminated:"
            f" {error}"
        ).coded(error.code) from error


def _why_none(
    account: AwsAccount, errors: Sequence[Mapping[str, Any]], pools: Sequence[SpotPool], wanted: str
) -> SkywardError:
    """Return one error for the pools' errors, with the code of each pool that was tried.

    An answer without errors means no capacity.
    """
    tried = [error for error in errors if (error.get("ErrorCode"), error.get("ErrorMessage")) != UNTRIED] or errors
    codes = {_place(error, pools): str(error.get("ErrorCode", "")) for error in tried}
    tried = tried or [dict(zip(("ErrorCode", "ErrorMessage"), UNTRIED, strict=True))]
    kinds = [(type(_failure(account, error, str(error.get("ErrorMessage", "")))), error) for error in tried]
    kind = next(kind for kind in WORST_FIRST if any(kind is found for found, _ in kinds))
    mine = [error for found, error in kinds if found is kind]
    worst = next((error for error in mine if error.get("ErrorCode") != "Unsupported"), mine[0])
    reasons = ", ".join(f"{place}: {code}" for place, code in codes.items())
    return _failure(account, worst, f"no pool has {wanted}: {reasons}. {worst.get('ErrorMessage', '')}")


def _failure(account: AwsAccount, error: Mapping[str, Any], message: str) -> SkywardError:
    """Return the error for one of a fleet's errors, with this message."""
    code = str(error.get("ErrorCode", ""))
    status = HTTPStatus.INTERNAL_SERVER_ERROR if OUTAGE.match(code) else HTTPStatus.BAD_REQUEST
    return account.refusal(code, status, message)


def _place(thing: Mapping[str, Any], pools: Sequence[SpotPool]) -> str:
    override = (thing.get("LaunchTemplateAndOverrides") or {}).get("Overrides") or {}
    return (
        f"{override.get('InstanceType', 'any type')} in {_zone(thing, pools) or 'any zone'}"
        f" ({override.get('SubnetId', 'no subnet')})"
    )


def _zone(thing: Mapping[str, Any], pools: Sequence[SpotPool]) -> str:
    """Return the zone of a machine or an error of the answer, by its subnet; "" if EC2 does not report it."""
    override = (thing.get("LaunchTemplateAndOverrides") or {}).get("Overrides") or {}
    return next((pool.zone for pool in pools if pool.subnet_id == override.get("SubnetId")), "")


def _types(pools: Iterable[SpotPool]) -> str:
    return " or ".join(dict.fromkeys(pool.instance_type for pool in pools))


def _digest(content: object) -> str:
    """Return a hash of some content, with 64 characters, the longest that a token may be."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, default=lambda value: base64.b64encode(value).decode()).encode()
    ).hexdigest()


# ── places and prices of machines ────────────────────────────────────────────────────────────────────────────────────


def ranked(machines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the machines of a listing with an `AmiLaunchIndex` that is unique within their launch.

    EC2 counts within one call of RunInstances, and a fleet may make several such calls. A machine has the place of its
    tag, else the index of EC2, else the first free place, in the order of the ids. Each reader of the same listing,
    terminated machines included, finds the same places. `settled` writes the missing ones as tags, so that they stay.
    """
    launches: dict[str, list[Mapping[str, Any]]] = {}
    for machine in machines:
        launches.setdefault(tags_of(machine).get(LAUNCH_TAG) or machine["InstanceId"], []).append(machine)
    return [{**machine, "AmiLaunchIndex": place} for some in launches.values() for machine, place in _places(some)]


def _places(machines: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    taken: dict[int, Mapping[str, Any]] = {}
    left = sorted(machines, key=lambda machine: str(machine["InstanceId"]))
    for says in (
        lambda machine: tags_of(machine).get(PLACE_TAG, ""),
        lambda machine: str(machine.get("AmiLaunchIndex", "")),
    ):
        for machine in list(left):
            place = says(machine)
            if place.isdecimal() and int(place) not in taken:
                taken[int(place)] = machine
                left.remove(machine)
    free = (place for place in range(len(taken) + len(left)) if place not in taken)
    return [*((machine, place) for place, machine in taken.items()), *zip(left, free, strict=False)]


def settled(
    account: AwsAccount,
    region: str,
    launch: str,
    found: Iterable[Mapping[str, Any]],
    prices: Mapping[tuple[str, str], float],
) -> list[dict[str, Any]]:
    """Tag the machines with their price, if it is not the offered one, and with their places; return them so tagged.

    `prices` are by type and zone. If tagging fails, a warning is logged, and the machines count at the offered price,
    which is the highest that they can cost.
    """
    ours = {machine["InstanceId"]: machine for machine in found}
    listed = ours | {
        machine["InstanceId"]: machine
        for machine in account.machines(region, {"Name": f"tag:{LAUNCH_TAG}", "Values": [launch]})
    }
    indices = {machine_id: machine.get("AmiLaunchIndex") for machine_id, machine in listed.items()}
    machines = [machine for machine in ranked(listed.values()) if machine["InstanceId"] in ours]
    changes: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for machine in machines:
        tags_to_write: dict[str, str] = {}
        price = prices.get((machine["InstanceType"], machine["Placement"]["AvailabilityZone"]))
        if price is not None and price != number(tags_of(machine).get(PRICE_TAG)):
            tags_to_write[PRICE_TAG] = repr(price)
        if machine["AmiLaunchIndex"] != indices[machine["InstanceId"]]:
            tags_to_write[PLACE_TAG] = str(machine["AmiLaunchIndex"])
        if tags_to_write:
            changes.setdefault(tuple(tags_to_write.items()), []).append(machine)

    def write(pairs: tuple[tuple[str, str], ...]) -> None:
        some = [machine["InstanceId"] for machine in changes[pairs]]
        tags = pairs_of(dict(pairs))
        try:
            account.ask(region, "ec2", "create_tags", Resources=some, Tags=tags)
        except SkywardError as error:
            log.warning(
                "%s count at the offered price, because their tags could not be written: %s", ", ".join(some), error
            )
            return
        for machine in changes[pairs]:
            machine["Tags"] = [*(tag for tag in machine["Tags"] if tag["Key"] not in dict(pairs)), *tags]

    each(list(changes), write)
    return machines
