"""Spot machines of EC2: one EC2 Fleet of type `instant` over all pools (a type in a zone) that cost no more than what
was offered.

EC2 chooses the pool, by what is there and what it costs (`price-capacity-optimized`): all machines of a launch are of
one type, in one zone, and there at once, or there are none. What it needs besides machines is a launch template or two,
which are in nobody's way and cost nothing:

| step | what is there | killed after it |
| --- | --- | --- |
| templates are made, with the pool's tags | templates | `prune_launches` deletes them when they are an hour old |
| the fleet is asked for, with a token | templates; perhaps machines with tags | reaper and sweep end them by their tags |
| the answer is there | templates, machines or none | the same |
| templates are deleted, whatever the answer was | machines or none | the same |
| each machine gets its type and price (`settled`) | machines | they count at the price that was offered |

The fleet itself is a record without cost, which AWS forgets by itself; nothing asks for it again.

A template's name is made from its content and the token of the launch, and the token of the fleet from all that is
asked for: the same launch asked again is the same call. An answer that is lost is asked for again with the same token;
an answer that says "none" is final, and asked for again with another one.

A `MaxPrice` is not set: with the price of now in it a machine would be taken back as soon as that rises at all (fact
sheet, 1.4: leave it out). The pools are those that cost no more than what was offered, by prices asked for a moment
before.

"Fact sheet" is the one of 2026-11-20.
"""  # noqa: E501

from __future__ import annotations

import base64
import hashlib
import json
import logging
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
from skyward_core.providers.aws import launch as aws_launch
from skyward_core.providers.aws.account import COMING, Account, each, meaning, number, state_of, terminated
from skyward_core.providers.aws.launch import PRICE_TAG, template_deleted
from skyward_core.providers.base import LAUNCH_TAG, Tags

CALL_TAG = "skyward-call"
"""Token of the fleet that a machine is of: EC2 does not tell it of itself, and a launch may have asked for other
machines as well.
"""
PLACE_TAG = "skyward-place"
"""Which machine of its launch it is, from 0 on, where `AmiLaunchIndex` does not tell it from another one."""

UNTRIED = ("UnfulfillableCapacity", "Failed to fulfill capacity. Please review errors in the response.")
"""What EC2 says of a pool that it has not tried, because another one has failed (fact sheet, 1.4)."""
OUTAGE = re.compile(r"Internal|Unavailable|ServiceUnavailable|ServerInternal")
"""Codes in a fleet's errors have no status beside them that would tell an outage from a mistake of ours."""
WORST_FIRST: Sequence[type[SkywardError]] = (
    QuotaExceeded,
    CredentialsError,
    RateLimited,
    NoCapacity,
    ProviderFailed,
    BadRequest,
)
"""Which of several pools' errors is told: what is true of them all first, then what another try may find otherwise."""
FLEET_ONLY, LAUNCH_ONLY = ("instance", "volume"), ("network-interface",)
"""What an instant fleet tags in its own words, and what only its template can tag: neither is said in both, where one
would replace the other.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pool:
    """A spot pool: a type in the zone of a subnet, and what RunInstances would say of it, `words`, but for type,
    subnet, market, number and tags.
    """

    instance_type: str
    zone: str
    subnet_id: str
    words: Mapping[str, Any]


def launched(
    account: Account, region: str, pools: Sequence[Pool], count: int, tags: Tags, tagging: Sequence[Mapping[str, Any]]
) -> tuple[list[str], str]:
    """Rent `count` machines in one of these pools; return their ids, and their zone ("" if EC2 does not tell).
    `tagging` is as RunInstances has it.

    Raises NoCapacity when no pool has them all; then there are none of them, or they are on their way out.
    """
    market = [[pool.instance_type, pool.zone, pool.subnet_id, pool.words] for pool in pools]
    call = _digest([tags[LAUNCH_TAG], region, count, market])
    in_template = [spec for spec in tagging if spec["ResourceType"] in LAUNCH_ONLY]
    data = [_data(pool.words, in_template) for pool in pools]
    names = [f"skyward-{_digest([tags[LAUNCH_TAG], one])[:40]}" for one in data]
    with _templates(account, region, dict(zip(names, data, strict=True)), tags):
        return _asked(account, region, _fleet(pools, names, count, tagging, call), pools, call)


def _data(words: Mapping[str, Any], tagging: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the words of RunInstances as a template has them: user data is base64 there already."""
    return {**words, "UserData": base64.b64encode(words["UserData"]).decode(), "TagSpecifications": list(tagging)}


def _fleet(
    pools: Sequence[Pool], names: Sequence[str], count: int, tagging: Sequence[Mapping[str, Any]], call: str
) -> dict[str, Any]:
    configs: dict[str, list[dict[str, Any]]] = {}
    for pool, name in zip(pools, names, strict=True):
        configs.setdefault(name, []).append({"InstanceType": pool.instance_type, "SubnetId": pool.subnet_id})
    own = [{"Key": CALL_TAG, "Value": call}]
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
            # all or nothing, which it is only with one of the two before it (fact sheet, 1.4)
            "MinTargetCapacity": count,
        },
        "TagSpecifications": [
            {**spec, "Tags": [*spec["Tags"], *own]} for spec in tagging if spec["ResourceType"] in FLEET_ONLY
        ],
    }


@contextmanager
def _templates(account: Account, region: str, wanted: Mapping[str, Mapping[str, Any]], tags: Tags) -> Generator[None]:
    """Make launch templates, and delete them in the end.

    One that is there already is of the same launch and has the same content.
    """
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]

    def make(name: str) -> None:
        try:
            account.ask(
                region,
                "ec2",
                "create_launch_template",
                LaunchTemplateName=name,
                LaunchTemplateData=wanted[name],
                ClientToken=_digest(name),
                TagSpecifications=[{"ResourceType": "launch-template", "Tags": pairs}],
            )
        except BadRequest as error:
            if not error.code.startswith("InvalidLaunchTemplateName.AlreadyExists"):
                raise

    def delete(name: str) -> None:
        try:
            template_deleted(account, region, name)
        except SkywardError as error:
            log.warning("launch template %s is left in %s, and taken away later: %s", name, region, error)

    try:
        each(list(wanted), make)
        yield
    finally:
        each(list(wanted), delete)


def _asked(
    account: Account, region: str, words: Mapping[str, Any], pools: Sequence[Pool], call: str
) -> tuple[list[str], str]:
    """Ask for the fleet until an answer is final.

    That EC2 was asked too often may stand in the answer: then nothing was made, and it is asked anew.
    """
    count = words["TargetCapacitySpecification"]["TotalTargetCapacity"]
    for turn, pause in enumerate((*aws_launch.AGAIN_SECONDS, None)):
        answer = _answer(account, region, words, _digest([call, turn]))
        if answer is None:
            return _found(account, region, call, count), ""
        got = answer.get("Instances", [])
        ids = [machine_id for one in got for machine_id in one.get("InstanceIds", [])]
        if len(ids) >= count:
            return ids, _zone(got[0], pools)
        error = _why_none(answer.get("Errors", []), pools, f"{count} x {_types(pools)} in {region} as spot")
        if ids:
            _give_back(account, region, ids, count)
            raise NoCapacity(f"{len(ids)} of {count} machines came, and are given back: {error}").coded(
                error.code or UNTRIED[0]
            ) from error
        if pause is None or not isinstance(error, RateLimited):
            raise error
        time.sleep(pause)
    raise AssertionError  # the last round returns or raises


def _answer(account: Account, region: str, words: Mapping[str, Any], token: str) -> Mapping[str, Any] | None:
    """Send the creating call, again with its token while nobody knows what became of it; None if that goes on."""
    for pause in (*aws_launch.AGAIN_SECONDS, None):
        try:
            return account.ask(region, "ec2", "create_fleet", once=True, ClientToken=token, **words)
        except ProviderFailed as error:
            if pause is None:
                log.warning("%s; what it may have made is looked for", error)
                return None
            time.sleep(pause)
    raise AssertionError  # the last round returns


def _found(account: Account, region: str, call: str, count: int) -> list[str]:
    listed = account.machines(region, {"Name": f"tag:{CALL_TAG}", "Values": [call]})
    ids = [machine["InstanceId"] for machine in listed if state_of(machine) in COMING]
    if len(ids) < count:
        raise ProviderFailed(
            f"AWS did not answer ec2 create_fleet in {region}; {len(ids)} of {count} machines are listed so far"
        )
    return ids


def _give_back(account: Account, region: str, ids: Sequence[str], count: int) -> None:
    """Ask for the end of machines that are too few.

    Raises ProviderFailed if they stay: then they are looked for, and ended, by their tags.
    """
    _, left = terminated(account, region, ids)
    if left:
        error = next(iter(left.values()))
        raise ProviderFailed(
            f"{len(ids)} of {count} machines came, and {', '.join(sorted(left))} could not be given back: {error}"
        ).coded(error.code) from error


def _why_none(errors: Sequence[Mapping[str, Any]], pools: Sequence[Pool], wanted: str) -> SkywardError:
    """Return what the pools' errors come to: each pool's code is told, those that were not tried left out.

    An answer without any says that nothing is there.
    """
    tried = [error for error in errors if (error.get("ErrorCode"), error.get("ErrorMessage")) != UNTRIED] or errors
    told = {_place(error, pools): str(error.get("ErrorCode", "")) for error in tried}
    kinds = [(_meaning(str(error.get("ErrorCode", ""))), error) for error in tried] or [
        (NoCapacity, dict(zip(("ErrorCode", "ErrorMessage"), UNTRIED, strict=True)))
    ]
    kind = next(kind for kind in WORST_FIRST if any(kind is found for found, _ in kinds))
    mine = [error for found, error in kinds if found is kind]
    worst = next((error for error in mine if error.get("ErrorCode") != "Unsupported"), mine[0])
    reasons = ", ".join(f"{place}: {code}" for place, code in told.items())
    return kind(f"no pool has {wanted}: {reasons}. {worst.get('ErrorMessage', '')}").coded(
        str(worst.get("ErrorCode", ""))
    )


def _meaning(code: str) -> type[SkywardError]:
    return meaning(code, HTTPStatus.INTERNAL_SERVER_ERROR if OUTAGE.match(code) else HTTPStatus.BAD_REQUEST)


def _place(thing: Mapping[str, Any], pools: Sequence[Pool]) -> str:
    override = (thing.get("LaunchTemplateAndOverrides") or {}).get("Overrides") or {}
    return (
        f"{override.get('InstanceType', 'any type')} in {_zone(thing, pools) or 'any zone'}"
        f" ({override.get('SubnetId', 'no subnet')})"
    )


def _zone(thing: Mapping[str, Any], pools: Sequence[Pool]) -> str:
    """Return the zone of a machine or an error of the answer, by its subnet; "" if EC2 does not tell."""
    override = (thing.get("LaunchTemplateAndOverrides") or {}).get("Overrides") or {}
    return next((pool.zone for pool in pools if pool.subnet_id == override.get("SubnetId")), "")


def _types(pools: Iterable[Pool]) -> str:
    return " or ".join(dict.fromkeys(pool.instance_type for pool in pools))


def _digest(content: object) -> str:
    """Return 64 characters, as many as a token may have, that stand for some content."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, default=lambda value: base64.b64encode(value).decode()).encode()
    ).hexdigest()


# ── which machine is which, and what it costs ────────────────────────────────────────────────────────────────────────


def ranked(machines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the machines of a listing with an `AmiLaunchIndex` that no other machine of their launch has.

    EC2 counts within one call of RunInstances, and nobody says how many of those a fleet is made of. A machine has the
    place that its tag says, else the one that EC2 says, else the first free one, in the order of the ids; any reader of
    the same listing, ended machines included, finds the same. `settled` writes down what EC2 does not say, so that it
    stays.
    """
    launches: dict[str, list[Mapping[str, Any]]] = {}
    for machine in machines:
        launches.setdefault(_tag(machine, LAUNCH_TAG) or machine["InstanceId"], []).append(machine)
    return [{**machine, "AmiLaunchIndex": place} for some in launches.values() for machine, place in _places(some)]


def _places(machines: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    taken: dict[int, Mapping[str, Any]] = {}
    left = sorted(machines, key=lambda machine: str(machine["InstanceId"]))
    for says in (lambda machine: _tag(machine, PLACE_TAG), lambda machine: str(machine.get("AmiLaunchIndex", ""))):
        for machine in list(left):
            place = says(machine)
            if place.isdecimal() and int(place) not in taken:
                taken[int(place)] = machine
                left.remove(machine)
    free = (place for place in range(len(taken) + len(left)) if place not in taken)
    return [*((machine, place) for place, machine in taken.items()), *zip(left, free, strict=False)]


def settled(
    account: Account,
    region: str,
    launch: str,
    found: Iterable[Mapping[str, Any]],
    prices: Mapping[tuple[str, str], float],
) -> list[dict[str, Any]]:
    """Write down what was got: what the machines cost, where that is less than what was offered, and their places.
    Returns them as they are told from now on.

    `prices` are by type and zone. What cannot be written is told in the log: then they count at the price that was
    offered, which is the most that they cost.
    """
    ours = {machine["InstanceId"]: machine for machine in found}
    listed = ours | {
        machine["InstanceId"]: machine
        for machine in account.machines(region, {"Name": f"tag:{LAUNCH_TAG}", "Values": [launch]})
    }
    indices = {machine_id: machine.get("AmiLaunchIndex") for machine_id, machine in listed.items()}
    machines = [machine for machine in ranked(listed.values()) if machine["InstanceId"] in ours]
    wishes: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for machine in machines:
        wish: dict[str, str] = {}
        price = prices.get((machine["InstanceType"], machine["Placement"]["AvailabilityZone"]))
        if price is not None and price != number(_tag(machine, PRICE_TAG)):
            wish[PRICE_TAG] = repr(price)
        if machine["AmiLaunchIndex"] != indices[machine["InstanceId"]]:
            wish[PLACE_TAG] = str(machine["AmiLaunchIndex"])
        if wish:
            wishes.setdefault(tuple(wish.items()), []).append(machine)

    def write(pairs: tuple[tuple[str, str], ...]) -> None:
        some = [machine["InstanceId"] for machine in wishes[pairs]]
        tags = [{"Key": key, "Value": value} for key, value in pairs]
        try:
            account.ask(region, "ec2", "create_tags", Resources=some, Tags=tags)
        except SkywardError as error:
            log.warning("what %s cost is told as the price that was offered: %s", ", ".join(some), error)
            return
        for machine in wishes[pairs]:
            machine["Tags"] = [*(tag for tag in machine["Tags"] if tag["Key"] not in dict(pairs)), *tags]

    each(list(wishes), write)
    return machines


def _tag(machine: Mapping[str, Any], name: str) -> str:
    return next((str(tag["Value"]) for tag in machine.get("Tags", []) if tag["Key"] == name), "")
