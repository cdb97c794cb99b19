"""The contract of a provider: its configuration and four methods.

Only `provisioning.rental` calls `launch`. All methods are synchronous; callers use threads. Each method returns within
a limited time, because teardown waits for it: a request that could hang has a time-out.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Self, cast

from pydantic import SecretStr, model_validator
from pydantic_core import PydanticUndefined, to_jsonable_python

from skyward_core.accelerators import Accelerator, parse
from skyward_core.accelerators.catalog import CHIPS, Chip
from skyward_core.errors import BadRequest, NoCapacity, SkywardError, question, without_logins
from skyward_core.frozen import Frozen
from skyward_core.machines.instances import Instance, NodeEnd
from skyward_core.machines.offers import Architecture, Offer, Requirements, describe, matches, memory_gb

POOL_TAG = "skyward-pool"
RANK_TAG = "skyward-rank"
"""Rank of the first machine of a launch. The others have the next ranks."""
LAUNCH_TAG = "skyward-launch"
"""Token of the creating call. A repeated call has the same token.

Providers with idempotency tokens pass it on.
"""
OWNER_TAG, PROCESS_TAG = "skyward-owner", "skyward-process"
"""The owner: `owner.Owner.name` and `owner.Owner.process`."""
TYPE_TAG = "skyward-instance-type"
CREATED_TAG, EXPIRES_TAG = "skyward-created", "skyward-expires"
"""When it was requested, and its hard end (absent: no limit): whole seconds since 1970, UTC."""
IMAGE_TAG = "skyward-image"
"""Content hash of the `Image` that a machine is prepared with, if its disk is to be captured (`Image.cache`).

A captured disk has this tag too.
"""
STARTED_FROM_TAG = "skyward-started-from"
"""The provider's id of the captured disk that a machine was started from."""
WORK_TAG = "skyward-work-"
"""Prefix of tags that say what a pool is for, one for each field of `Work`. They are for people and cost reports."""
ENTRY_POINTS = "skyward.providers"
BUILT_IN: Mapping[str, str] = {
    name.lower(): name for name in cast("tuple[str, ...]", importlib.import_module("skyward_core").PROVIDERS)
}
"""Name of a provider, which is that of its module in this package, to its class there.

The list is that of the public names, which cannot import this package: it is large.
"""
MOST_REASONS = 20
A100_ON_AWS: Mapping[int, str] = {80: "p4de.24xlarge", 40: "p4d.24xlarge"}
"""The types with A100, by the memory of each chip in GB. AWS's API names both chips A100, and reports 40960 and 81920
MiB (DescribeInstanceTypes, checked 2026-11).
"""


type Tags = Mapping[str, str]
"""Tags of an instance: `skyward-pool` (the pool's id) and others by which the caller finds it."""


class Sale(list[Offer]):
    """Offers of a provider, with what else it knows. Any other list is complete.

    Attributes:
        unasked: the error of each region that could not be queried.
        elsewhere: offers of regions that the provider's `region=` excludes; for messages.
    """

    def __init__(
        self,
        offers: Iterable[Offer],
        unasked: Mapping[str, SkywardError] | None = None,
        elsewhere: Iterable[Offer] = (),
    ) -> None:
        super().__init__(offers)
        self.unasked = dict(unasked or {})
        self.elsewhere = tuple(elsewhere)

    @classmethod
    def within(cls, regions: str | Iterable[str] | None, offers: Iterable[Offer]) -> Self:
        """Split the offers of all regions by `region=`: one region, several, or None for all."""
        wanted = {regions} if isinstance(regions, str) else set(regions or ())
        every = list(offers)
        return cls(
            (offer for offer in every if not wanted or offer.region in wanted),
            elsewhere=(offer for offer in every if wanted and offer.region not in wanted),
        )


def chips(names: str) -> frozenset[str]:
    """Return chips of `accelerators.catalog` by their names: "L40S, RTX 4000 Ada"."""
    return frozenset(names.split(", "))


class Provider(Frozen):
    """A source of machines that are rented.

    A frozen value. It holds a secret only if the user gave it one. Importing its module imports no SDK.
    """

    name: ClassVar[str]
    display_name: ClassVar[str] = ""
    """The cloud's name in messages. Empty where nothing is rented."""
    rents: ClassVar[frozenset[str]] = frozenset()
    """The chips in the cloud's catalogue. Only its API reports whether one is free, and its price.

    Those of the built-in clouds are as of 2026-11-20 (fact sheet, sections 1.11, 2.6, 3.6, 4.6 and 5.5).
    """
    refuses: ClassVar[Mapping[str, str]] = {}
    """What the provider can never do ("apt", "shell", "volume", "mig"), each with the reason and an alternative.

    Such a spec is refused before anything is launched.
    """

    of_one_computer: ClassVar[frozenset[str]] = frozenset({"ssh_key"})
    """Fields that only say how one computer reaches the machines: paths of files, names of profiles.

    Processes that share a pool may differ in them.
    """

    harmless_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that whoever writes to the ledger may set in a pool's row: places, prices and sizes.

    They send no credentials anywhere, and run nothing. A field that is in none of these three sets leads to the
    machines: a process uses it if its own user names it, or a row that is signed (`config/own_providers.py`).
    """
    own_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that find no machine: what is rented, and how one logs in to it, beside those of `of_one_computer`.

    A process takes its own, or the default, in place of those in a row that is not signed.
    """

    is_local: ClassVar[bool] = False
    """True if its instances are processes of this machine. They run the whole bootstrap as their startup script.

    All other instances are reached over SSH.
    """
    end_command: ClassVar[str] = ""
    """The command with which a machine ends itself, as root. Empty where machines do not end themselves."""

    notice_url: ClassVar[str] = ""
    """URL at which a spot machine polls for its preemption notice, in the format of EC2's metadata service.

    Empty where there is no such service.
    """

    terminate_confirms: ClassVar[bool] = False
    """True if `terminate` returns only when the machines are gone. Then no listing is needed for confirmation."""
    gone_deadline_seconds: ClassVar[float] = 120.0
    """How long it may take until the listing shows that terminated machines are gone."""

    listing_lag_seconds: ClassVar[float] = 0.0
    """How long `instances` may omit a machine that exists."""
    ends_for_good_with: ClassVar[str] = ""
    """What a user gives so that machines end for good, if they do not (`ends_for_good`): "node_token=..."."""
    billing_increment_seconds: ClassVar[int] = 1
    """Each begun interval of this length is billed in full."""
    tells_what_is_paid: ClassVar[bool] = False
    """True if the price of a launched machine includes everything. It may be lower than its offer's price."""
    billing_minimum_seconds: ClassVar[int] = 0
    """The shortest time that is billed, even if a machine lived for less."""
    billing_minimum_usd: ClassVar[float] = 0.0
    """The least that is billed for a machine that costs anything, in USD. The greater of both minimums counts."""

    ending_seconds: ClassVar[float] = 60.0
    """How long a machine is usually billed after its termination was requested, or after it begins to end itself.

    `max_cost` reserves that for each machine.
    """

    sells_by_wish: ClassVar[bool] = False
    """True if `offers` returns only a part of what is sold, depending on the requirements."""

    keeps_images: ClassVar[bool] = False
    """True if it can capture the disk of a prepared machine (`keep_image`) and launch others from it (`launch`)."""

    @property
    def simulates(self) -> bool:
        """Whether accelerators of its machines are simulated. Calls can see this, and see no GPU."""
        return False

    @property
    def most_machines(self) -> int | None:
        """How many machines it has in all; None if only a launch knows."""
        return None

    @model_validator(mode="after")
    def _urls_hold_no_login(self) -> Self:
        for field in sorted(self.model_fields_set):
            value = getattr(self, field)
            if field.endswith("url") and isinstance(value, str) and without_logins(value) != value:
                raise ValueError(
                    f"{field} must not hold a password or token, because providers are written to logs and the ledger"
                )
        return self

    @property
    def written_credentials(self) -> tuple[str, ...]:
        """Names of the fields in which the user has written a secret. `to_json` leaves them out."""
        return tuple(name for name in type(self).model_fields if isinstance(getattr(self, name), SecretStr))

    def for_pool(self) -> Provider:
        """Return the provider as one pool uses it. It equals this one, and may cache what it has seen.

        Returns itself where nothing is cached.
        """
        return self

    def offers(self, want: Requirements) -> list[Offer]:
        """Return what is sold now and may match. A read, safe to repeat; the caller filters the list.

        Raises CredentialsError if the credentials are refused, and ProviderFailed during an outage: an empty list means
        that nothing is sold. If only some regions answer, or `region=` excludes some, returns a `Sale`.
        """
        raise NotImplementedError

    def may_sell_spot(self, want: Requirements) -> bool:
        """Return whether matching spot machines may be sold at another time, though `offers` has none now.

        Sends no request. True where spot is listed only while a machine is free. False where spot is never sold, or is
        always listed: a pool that demands spot is then refused.
        """
        return False

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent up to `count` machines that run `startup`, a shell script; tags go into the creating call.

        May wait until the machines have addresses. Fewer machines than requested are no error; none is NoCapacity. An
        error does not prove that nothing was launched: the caller sweeps by tag.
        """
        raise NotImplementedError

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the existing machines of a pool, or of all pools. GONE machines are left out.

        Asks the provider by tag, and never uses memory. Raises any failure: an empty list means that none exist.
        """
        raise NotImplementedError

    def terminate(self, ids: Sequence[str]) -> Mapping[str, str] | None:
        """Terminate machines. Ids that are gone already are accepted. On return each one is gone or being deleted.

        A provider that sees that a machine is gone may return the evidence, in words, by id; receipts contain it.
        Raises InstancesLeft with the ids that are not terminated.
        """
        raise NotImplementedError

    def keep_image(self, instance: Instance, image_hash: str) -> str | None:
        """Begin to capture the disk of a machine, for later launches with the same IMAGE_TAG.

        Returns the id of the capture; None if one exists or is in progress. Later writes to the disk are not in the
        copy. Raises the error that prevents the capture. Then no capture will exist, as far as that can be ensured.
        """
        raise NotImplementedError

    def prune(self, now: datetime, *, is_dry_run: bool) -> list[str]:
        """Delete what outlives pools and is not needed any more, mainly captured disks. May be called again.

        Returns what was deleted, or would be, in words. Leaves machines alone: `instances` lists those. Raises the
        first failure after everything else is done.
        """
        return []

    def may_be_left_to_its_lease(self) -> bool:
        """Return whether an unconfirmed machine costs nothing and ends itself by its lease.

        Then closing a pool warns, and does not raise.
        """
        return False

    def missing_credentials(self) -> str:
        """Return what is missing before the first request, and how it is set; "" if there are credentials, right or
        wrong, or if it needs none. Asks no cloud.
        """
        return ""

    def stopped_spot(self) -> str:
        """Return what is billed of a spot machine that the provider has stopped, and until when; "" if nothing is.

        A stopped machine cannot end itself.
        """
        return ""

    def ends_for_good(self) -> bool:
        """Return whether a machine that has ended itself is gone and not billed any more.

        Sends no request; False where it is unknown.
        """
        return False

    def ends(self, ids: Sequence[str]) -> Mapping[str, NodeEnd]:
        """Return when and why machines have ended that no process saw end, by id, where that can be found out.

        A read, safe to repeat; used for machines that `instances` lacks. Empty by default: then the time is estimated.
        """
        return {}

    def account(self) -> str:
        """Return the account that owns the machines, in the provider's terms; "" where there are no accounts.

        Not a secret. One account's listing says nothing about another's machines. Raises CredentialsError, and
        ProviderFailed during an outage.
        """
        return ""

    def quotas(self) -> Mapping[str, float]:
        """Return what the provider tells of the account's limits, each with its unit: {"credit in USD": 12.5}.

        Zero or less means that nothing can be rented. Empty where the provider tells nothing. A read; raises
        CredentialsError if these credentials may not read it, and ProviderFailed during an outage.
        """
        return {}

    def console_url(self, instance: Instance) -> str | None:
        """Return the page of the provider's console that shows the machine; None if there is none."""
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the provider as plain data: its name, and the fields that were set."""
        return {"name": type(self).name, **self.model_dump(mode="json", exclude_unset=True)}


def load(provider: str | Mapping[str, Any] | Provider) -> Provider:
    """Return a provider from its name ("local"), from its plain data ({"name": "local", ...}), or itself.

    Built-in providers are in BUILT_IN, others in the entry-point group `skyward.providers`. For a built-in one case
    and punctuation do not count: "VastAI" and "Vast.ai" are "vastai". Raises BadRequest.
    """
    if isinstance(provider, Provider):
        return provider
    if isinstance(cast(object, provider), type):
        raise BadRequest(
            f"{cast(type, provider).__name__} is the class of a provider: write sky.{cast(type, provider).__name__}()"
        )
    if not isinstance(cast(object, provider), str | Mapping):
        raise BadRequest(
            f'{provider!r} is no provider: write a name such as "aws" or "local", or a provider such as sky.AWS()'
        )
    fields = {"name": provider} if isinstance(provider, str) else dict(provider)
    name = str(fields.pop("name", ""))
    kind = kind_of(name)
    try:
        return kind(**fields)
    except BadRequest as error:
        raise BadRequest(f"provider {name!r}: {error}") from error


def kind_of(name: str) -> type[Provider]:
    """Return the class of a provider. Raises BadRequest for a name that no provider has."""
    key = plain_name(name)
    if key in BUILT_IN:
        return cast("type[Provider]", getattr(importlib.import_module(f"skyward_core.providers.{key}"), BUILT_IN[key]))
    if name in (found := _entry_points(tuple(sys.path))):
        return cast("type[Provider]", found[name].load())
    known = sorted({*BUILT_IN, *found})
    near = question(name, known)
    raise BadRequest(f"no provider is called {name!r}; {near}{' ' if near else ''}known here: {', '.join(known)}")


def sensitive_fields(provider: Mapping[str, Any], kind: type[Provider] | None) -> dict[str, Any]:
    """Return the fields of a provider's plain data that not everybody may set: neither harmless nor the default.

    All fields, if the class is not known.
    """
    if kind is None:
        return {name: value for name, value in provider.items() if name != "name"}
    fields = kind.model_fields.items()
    defaults = {
        name: to_jsonable_python(field.default) for name, field in fields if field.default is not PydanticUndefined
    }
    return {
        name: value
        for name, value in provider.items()
        if name != "name" and name not in kind.harmless_fields and (name not in defaults or value != defaults[name])
    }


def plain_name(name: str) -> str:
    """Return a name without case and punctuation: the name of the class will do, and that of the cloud."""
    return re.sub("[-_. ]", "", name).casefold()


@functools.lru_cache(maxsize=1)
def _entry_points(_path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Return the providers of other distributions.

    Read once for each `sys.path`, because that opens a file of each installed distribution, which takes 20 ms.
    """
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def load_all(providers: object) -> tuple[Provider, ...]:
    """Return one provider, or those of a list, each read by `load`.

    Raises BadRequest, also for an empty list and for duplicates.
    """
    if not isinstance(providers, list | tuple):
        return (load(cast("Any", providers)),)
    found = tuple(load(provider) for provider in cast("Sequence[Any]", providers))
    if not found:
        raise BadRequest("an empty list of providers: name one, or leave it out")
    if len({json.dumps(provider.to_json(), sort_keys=True) for provider in found}) < len(found):
        raise BadRequest("the same provider is named twice")
    return found


def rank(offers: Iterable[Offer], want: Requirements) -> list[Offer]:
    """Return the offers that match, cheapest first, then the smallest.

    Raises NoCapacity with the reasons if no offer matches.
    """
    offers = list(offers)
    good = [offer for offer in offers if matches(offer, want) is None]
    if not good:
        raise NoCapacity(f"no provider offers {describe(want)}: {why_none(offers, want)}")
    return sorted(good, key=lambda offer: (offer.total_per_hour, offer.vcpus, offer.memory_gb))


def why_none(offers: Sequence[Offer], want: Requirements) -> str:
    """Return why each of the first offers does not match, those with the right accelerator first.

    If no offer has the accelerator, the text names the clouds that rent it.
    """
    wanted = want.accelerator.name if want.accelerator is not None else None
    near = sorted(offers, key=lambda offer: (offer.accelerator != wanted, offer.total_per_hour))[:MOST_REASONS]
    reasons = [f"{offer.name} {matches(offer, want)}" for offer in near]
    more = [f"and {len(offers) - len(near)} others"] if len(offers) > len(near) else []
    text = "; ".join([*reasons, *more]) or "there are no offers at all"
    is_aws = any(offer.provider == "aws" for offer in offers)
    if want.accelerator is not None and is_aws and (sizes := sizes_on_aws(want.accelerator)):
        text += f". {sizes[0].upper()}{sizes[1:]}"
    if want.accelerator is None or any(offer.accelerator == wanted for offer in offers):
        return text
    simulation = (
        f'. Local(simulate="{want.accelerator.name}") simulates one here.'
        if any(offer.provider == "local" for offer in offers)
        else ""
    )
    return f"{text}. {advice(want.accelerator)}{simulation}"


def select_instance(
    available: Iterable[Offer],
    accelerator: Accelerator | str | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    architecture: Architecture | None = None,
) -> Offer:
    """Return the smallest of these offers with the accelerator, CPU cores and memory ("128GB"); of equals the cheaper.

    The smallest has the fewest accelerators, then CPUs, then memory. Raises NoCapacity with the reasons if none
    matches.
    """
    wanted = parse(accelerator) if isinstance(accelerator, str) else accelerator
    want = Requirements(
        accelerator=wanted,
        vcpus=cpu,
        memory_gb=None if memory is None else memory_gb(memory),
        architecture=architecture,
    )
    return min(
        rank(available, want),
        key=lambda offer: (offer.accelerators, offer.vcpus, offer.memory_gb, offer.total_per_hour),
    )


def rented_by(name: str) -> tuple[str, ...]:
    """Return the built-in clouds that rent this chip of the catalogue, by their names in messages.

    >>> rented_by("MI325X")
    ('DigitalOcean',)
    """
    return tuple(kind.display_name for kind in map(kind_of, BUILT_IN) if name in kind.rents)


def sizes_on_aws(accelerator: Accelerator) -> str:
    """Return which AWS type has this size of the chip, and how to get the other one; "" if all types have the same.

    >>> sizes_on_aws(Accelerator("A100"))
    'on AWS A100 80GB is a p4de.24xlarge; a p4d.24xlarge has A100 40GB: write "A100-40GB"'
    """
    if accelerator.name != "A100" or accelerator.memory_gb not in A100_ON_AWS:
        return ""
    ((other, its_type),) = [one for one in A100_ON_AWS.items() if one[0] != accelerator.memory_gb]
    return (
        f"on AWS A100 {accelerator.memory} is a {A100_ON_AWS[accelerator.memory_gb]}; a {its_type} has A100 {other}GB:"
        f' write "A100-{other}GB"'
    )


def advice(accelerator: Accelerator) -> str:
    """Return which clouds rent the accelerator, as text; if none does, the most similar chip that is rented.

    It has at least as much memory, if possible the same vendor, and the nearest size.

    >>> advice(Accelerator("GB200", 186))
    'GB200 is rented by none of the built-in clouds; nearest to it in memory is B300 288GB (AWS, DigitalOcean, Verda,
    Vast.ai, RunPod)'
    """
    if clouds := rented_by(accelerator.name):
        return f"{accelerator.name} is rented by {', '.join(clouds)}"
    known = [(memory_gb, chip) for chip in CHIPS if rented_by(chip.name) for memory_gb in chip.memory_gb]

    def distance(one: tuple[int, Chip]) -> tuple[bool, bool, int, int]:
        memory_gb, chip = one
        return (
            memory_gb < accelerator.memory_gb,
            chip.vendor != accelerator.vendor,
            abs(memory_gb - accelerator.memory_gb),
            -len(rented_by(chip.name)),
        )

    memory_gb, chip = min(known, key=distance)
    clouds = ", ".join(rented_by(chip.name))
    return (
        f"{accelerator.name} is rented by none of the built-in clouds; nearest to it in memory is {chip.name}"
        f" {memory_gb}GB ({clouds})"
    )
