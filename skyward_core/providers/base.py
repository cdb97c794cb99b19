"""What a provider is: its own configuration, with four verbs.

`launch` is called by `provisioning.rental` alone, `terminate` by it and by `teardown`. All four are synchronous,
threads are the caller's business; each comes to an end by itself: a request that could hang has a time-out, for whoever
gives machines back waits for it.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, cast

from skyward_core.errors import BadRequest, SkywardError
from skyward_core.frozen import Frozen
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, Requirements

type Tags = Mapping[str, str]
"""Tags of an instance: `skyward-pool` (the pool's id) and whatever else the caller wants to be found by."""

POOL_TAG = "skyward-pool"
RANK_TAG = "skyward-rank"
"""Rank of the first machine of a launch; the others count on from it."""
LAUNCH_TAG = "skyward-launch"
"""Token of the creating call: the same in a call that is tried again.

A provider that knows idempotency tokens hands it on.
"""
OWNER_TAG, PROCESS_TAG = "skyward-owner", "skyward-process"
"""Who has asked for it, as `owner.Owner.name` and `owner.Owner.process`."""
TYPE_TAG = "skyward-instance-type"
CREATED_TAG, EXPIRES_TAG = "skyward-created", "skyward-expires"
"""When it was asked for, and when it must be gone at the latest (absent: no such limit): whole seconds since 1970, UTC.
"""
IMAGE_TAG = "skyward-image"
"""The content hash of the `Image` that a machine is prepared with, if it is to be kept (`Image.cache`); a disk that a
provider has kept carries it too.
"""
STARTED_FROM_TAG = "skyward-started-from"
"""The provider's id of the kept disk that a machine was started from."""
WORK_TAG = "skyward-work-"
"""What the tags begin with that say what a pool is for, one for each field of `Work`: for people and for a cloud's own
cost reports.
"""
ENTRY_POINTS = "skyward.providers"


class Sale(list[Offer]):
    """Offers of a provider some of whose regions could not be asked: `unasked` says why, by region.

    Of any other list all could.
    """

    def __init__(self, offers: Iterable[Offer], unasked: Mapping[str, SkywardError]) -> None:
        super().__init__(offers)
        self.unasked = dict(unasked)


class Provider(Frozen):
    """Somebody who rents machines.

    A frozen value that holds no secret unless it was given one; importing its file imports no SDK.
    """

    name: ClassVar[str]
    refuses: ClassVar[Mapping[str, str]] = {}
    """What the provider can never do ("apt", "volume", "mig"), each with the reason and the alternative; refused before
    anything is launched.
    """

    is_here: ClassVar[bool] = False
    """True if its instances are processes of this machine, which run the whole bootstrap as their startup script; the
    others are reached over SSH.
    """
    end_command: ClassVar[str] = ""
    """What a machine runs, as root, to end itself; nothing where it lives on without us."""

    notice_url: ClassVar[str] = ""
    """Where a spot machine asks, on itself, whether it is to be taken back: a metadata service in the manner of EC2's.

    Nothing where there is none.
    """

    terminate_confirms: ClassVar[bool] = False
    """True if `terminate` returns only when the machines are gone: the provider need not be asked whether they are."""
    gone_deadline_seconds: ClassVar[float] = 120.0
    """How long it may take until terminated machines are known to be gone."""

    listing_lag_seconds: ClassVar[float] = 0.0
    """How long a machine that exists may be missing in what `instances` returns."""
    billing_increment_seconds: ClassVar[int] = 1
    """A begun stretch of so many seconds is paid for whole."""
    tells_what_is_paid: ClassVar[bool] = False
    """True if the price of a machine that was launched is all that it costs, and may be lower than its offer's."""
    billing_minimum_seconds: ClassVar[int] = 0
    """What is paid for at least, however short a machine lived."""
    billing_minimum_usd: ClassVar[float] = 0.0
    """What is paid at least for a machine that costs anything, in USD: the greater of both minimums counts."""

    ending_seconds: ClassVar[float] = 60.0
    """How long a machine usually goes on being billed once its end was asked for, or it ends itself: `max_cost` has
    that set aside for each.
    """

    sells_by_wish: ClassVar[bool] = False
    """True if `offers` returns a part of what is sold, the one for that wish: it says nothing of another's."""

    keeps_images: ClassVar[bool] = False
    """True if it can keep the disk of a prepared machine, and start others from it: `keep_image` does the former,
    `launch` the latter.
    """

    @property
    def simulates(self) -> bool:
        """Whether the accelerators of its machines are simulated: calls are told so, and see no GPU."""
        return False

    def for_pool(self) -> Provider:
        """Return the provider as one pool uses it while it lives: equal to this one, and free to remember what it has
        seen. Itself where there is nothing.
        """
        return self

    def offers(self, want: Requirements) -> list[Offer]:
        """Return what is sold now that could serve. A read, safe to repeat; may return more than matches, the caller
        filters.

        Raises CredentialsError if the provider refuses us, and lets an outage through: an empty list means that nothing
        is sold. With several regions, of which some cannot be asked, a `Sale`.
        """
        raise NotImplementedError

    def may_sell_spot(self, want: Requirements) -> bool:
        """Tell whether spot machines that fit may be sold at another moment, though `offers` has none of them now. Asks
        nobody.

        True where they are listed only while one is free. False where spot is never sold, or is listed whether one is
        free or not: who demands it is refused.
        """
        return False

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent up to `count` machines, tagged in the creating call, that run the shell script `startup` when they come
        up. Returns at once.

        Fewer than asked is no error; none is NoCapacity. An error does not prove that nothing was launched: the caller
        sweeps by tag.
        """
        raise NotImplementedError

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the machines of a pool that exist, GONE ones left out; without a pool, those of all pools. Asks the
        provider by tag, never memory.

        Any failure to find out is raised; an empty list means that none exist.
        """
        raise NotImplementedError

    def terminate(self, ids: Sequence[str]) -> Mapping[str, str] | None:
        """Give machines back. Ids that are gone already are accepted. When it returns, each one is gone or on its way.

        A provider that sees for itself that a machine is gone may return how it knows, in words, by id: receipts have
        it as evidence. Raises InstancesLeft with the ids that are not.
        """
        raise NotImplementedError

    def keep_image(self, instance: Instance, image_hash: str) -> str | None:
        """Begin to keep the disk of a machine, for later launches that carry the same IMAGE_TAG; return its id, None if
        it is kept already, or will be.

        When it returns, the moment that the copy shows is over: what is written to the disk from then on is in no copy.
        Raises what is in the way of it; then none will come to be, as far as that is in anybody's hands.
        """
        raise NotImplementedError

    def prune(self, now: datetime, *, is_dry_run: bool) -> list[str]:
        """Take away what outlives pools and is of no use any more, kept disks above all; return in words what that was,
        or would be. May be called again.

        Nothing that machines are made of: those are `instances`. Raises the first failure once everything else is done.
        """
        return []

    def may_be_left_to_its_lease(self) -> bool:
        """Tell whether a machine that cannot be confirmed gone costs nothing and ends itself by its lease: then closing
        a pool warns, and does not raise.
        """
        return False

    def ends_for_good(self) -> bool:
        """Tell whether a machine that has ended itself is gone, and paid for no more.

        Asks nobody; False where that cannot be told.
        """
        return False

    def account(self) -> str:
        """Return whose machines `launch` and `instances` are about, in the provider's own words; "" where there are no
        accounts.

        Not a secret. What one account lists says nothing of another's machines. Raises CredentialsError, and lets an
        outage through.
        """
        return ""

    def console_url(self, instance: Instance) -> str | None:
        """Return where a person sees the machine in the provider's own pages; None if there is no such place."""
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the provider as plain data: its name, and the fields that were set."""
        return {"name": type(self).name, **self.model_dump(mode="json", exclude_unset=True)}


def load(wish: str | Mapping[str, Any] | Provider) -> Provider:
    """Return a provider from its name ("local"), its plain data ({"name": "local", ...}), or itself.

    Providers are found by module name, those of other distributions by the entry-point group `skyward.providers`.
    Raises BadRequest.
    """
    if isinstance(wish, Provider):
        return wish
    if isinstance(cast(object, wish), type):
        raise BadRequest(
            f"{cast(type, wish).__name__} is the class of a provider: write sky.{cast(type, wish).__name__}()"
        )
    if not isinstance(cast(object, wish), str | Mapping):
        raise BadRequest(
            f'{wish!r} is no provider: write a name such as "aws" or "local", or a provider such as sky.AWS()'
        )
    fields = {"name": wish} if isinstance(wish, str) else dict(wish)
    name = str(fields.pop("name", ""))
    if name in BUILT_IN:
        module, _, class_name = BUILT_IN[name].rpartition(".")
        kind = cast("type[Provider]", getattr(importlib.import_module(f"skyward_core.providers.{module}"), class_name))
    elif name in (found := _elsewhere(tuple(sys.path))):
        kind = cast("type[Provider]", found[name].load())
    else:
        known = sorted({*BUILT_IN, *found})
        near = get_close_matches(name, known, 1)
        raise BadRequest(
            f"no provider is called {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}known here:"
            f" {', '.join(known)}"
        )
    try:
        return kind(**fields)
    except BadRequest as error:
        raise BadRequest(f"provider {name!r}: {error}") from error


@functools.lru_cache(maxsize=1)
def _elsewhere(_path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Return the providers of other distributions, read once for each `sys.path`: that opens a file of each
    distribution that is installed, 20 ms of work.
    """
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def load_all(wish: object) -> tuple[Provider, ...]:
    """Return one provider, or those of a list, each as `load` reads it.

    Raises BadRequest, for an empty list and for the same one twice too.
    """
    if not isinstance(wish, list | tuple):
        return (load(cast("Any", wish)),)
    found = tuple(load(one) for one in cast("Sequence[Any]", wish))
    if not found:
        raise BadRequest("an empty list of providers: name one, or leave it out")
    if len({json.dumps(one.to_json(), sort_keys=True) for one in found}) < len(found):
        raise BadRequest("the same provider is named twice")
    return found


BUILT_IN: Mapping[str, str] = {
    "aws": "aws.provider.AWS",
    "digitalocean": "digitalocean.provider.DigitalOcean",
    "hosts": "hosts.Hosts",
    "local": "local.Local",
    "runpod": "runpod.provider.RunPod",
    "vastai": "vastai.provider.VastAI",
    "verda": "verda.provider.Verda",
}
"""Name of a provider to its module in this package and its class there."""
