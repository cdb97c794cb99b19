"""Virtual machines of Verda (formerly DataCrunch): api.verda.com/v1, as told by its documentation and SDKs up to
November 2026 (docs/clouds/verda.md).

What is odd there: a token of an hour for two halves of a credential; prices as strings; ids as plain text; boot scripts
and disks that are objects of their own, are not tagged, and may outlive the machine; no word of warning before a spot
machine is taken back.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Self, cast
from urllib.parse import quote

from pydantic import Field, SecretStr, model_validator

from skyward_core.accelerators.catalog import find
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.machines.offers import Extra, Offer, Requirements, architecture_beside, by_month
from skyward_core.providers._http import Api, field_of, rows_in
from skyward_core.providers.base import CREATED_TAG, LAUNCH_TAG, POOL_TAG, RANK_TAG, WORK_TAG, Provider, Tags
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import launch_word, of_machine
from skyward_core.providers.userdata import END_COMMAND, boot_script, directory_of, script

type Json = dict[str, Any]

URL = "https://api.verda.com/v1"
CONSOLE = "https://console.verda.com"
ADDRESS_SECONDS = 600.0
"""How long a machine may take from the creating call to its address."""
HOST_KEY_SECONDS = 180.0
"""How long after its first answer a machine may show the host key of its image: its script may finish a minute after
sshd answers.
"""
BUSY_SECONDS = 240.0
"""How long `terminate` asks again for machines that cannot be deleted yet: Verda refuses that while it provisions them.
"""
NVME_USD_PER_GB_MONTH = 0.20
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 5.0
ORPHAN_SECONDS = 3600
"""Scripts and disks of ours that belong to no machine are left alone for so long: another process may be about to
launch theirs.
"""
TAG_CHARACTERS, MOST_TAGS = 127, 10

STATES: Mapping[str, InstanceState] = {
    **dict.fromkeys(("ordered", "new", "provisioning", "validating", "pending", "restoring"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    **dict.fromkeys(
        ("offline", "starting_hibernation", "hibernating", "error", "no_capacity", "deleting", "notfound"),
        InstanceState.STOPPING,
    ),
    "discontinued": InstanceState.GONE,
}
"""What is not here ("unknown") is PENDING: it may be paid for, and cannot be used."""

# Verda has one code, invalid_request, for most refusals: these texts tell them apart.
QUOTA_WORDS = ("quota", "limit exceeded", "exceeds the limit")
CAPACITY_WORDS = ("no capacity", "not available", "unavailable", "insufficient capacity")
GONE_WORDS = ("invalid instance id", "discontinued instance", "already discontinued", "instance not found")
BUSY_WORDS = ("can't discontinue a", "cannot discontinue a", "can't delete a", "cannot delete a")

OLD_CHIPS = frozenset({"V100", "RTX A6000"})
"""Verda's images with CUDA 13 do not serve these."""
OPEN_CHIPS = frozenset({"B200", "B300", "GB200", "GB300", "RTX PRO 6000"})
"""Blackwell: needs the open kernel module and CUDA 12.8."""

NAME = re.compile(r"(?P<pool>.+)-(?P<rank>\d+)-(?P<launch>[a-z0-9]{1,8})")
DISK_PREFIX = "skyward-"
SCRIPT_NAME = re.compile(r"skyward-(?P<pool>.+)-(?P<launch>[a-z0-9]{1,8})-(?P<made>\d+)")

END_BY_ITSELF = """\
command -v python3 >/dev/null || exec poweroff
python3 - "$(hostname)" <<'SKYWARD_PYTHON'
import json, sys, urllib.request

URL, CLIENT_ID, CLIENT_SECRET = {words}

def ask(method, path, body=None, token=""):
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + token}} if token else {{"Content-Type": "application/json"}}
    request = urllib.request.Request(URL + path, None if body is None else json.dumps(body).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")

try:
    token = ask("POST", "/oauth2/token", {{"grant_type": "client_credentials", "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}})["access_token"]
    for machine in ask("GET", "/instances", token=token):
        if machine["hostname"] == sys.argv[1]:
            disk = {{"volume_ids": [machine["os_volume_id"]], "delete_permanently": True}} if machine.get("os_volume_id") else {{}}
            ask("PUT", "/instances", {{"id": [machine["id"]], "action": "delete", **disk}}, token)
except Exception as error:
    print("this machine cannot delete itself yet:", type(error).__name__, getattr(error, "code", ""), flush=True)
SKYWARD_PYTHON"""  # noqa: E501
"""Is run again until the machine is gone: one that were off would be paid for as well, and try no more."""

log = logging.getLogger(__name__)


class Verda(Provider):
    """Rent virtual machines of Verda, formerly DataCrunch.

    Args:
        region: one location such as "FIN-03", or several; all if not given.
        client_id, client_secret: credentials of the cloud API; by default VERDA_CLIENT_ID and VERDA_CLIENT_SECRET, then
            the file of Verda's own tools.
        node_client_id, node_client_secret: credentials that are planted on each machine, so that it can delete itself.
            The user's code can read them there, and Verda knows no credentials with fewer rights. Without them a
            machine that ends itself powers off, and is paid for until it is terminated.
        image: an image's slug ("ubuntu-24.04-cuda-13.0-open-docker"); by default one that fits the machine is chosen.
        os_volume_gb: size of a machine's disk, which is paid for beside it, in GB.
        ssh_key: path of an SSH key of one's own.
        endpoint_url: where the API is, version included.
    """

    name: ClassVar[str] = "verda"
    end_command: ClassVar[str] = END_COMMAND
    gone_deadline_seconds: ClassVar[float] = 300.0
    listing_lag_seconds: ClassVar[float] = 60.0
    """Creating calls that hung for longer than our time-out were seen: what they make comes into the listing late."""
    billing_increment_seconds: ClassVar[int] = 600

    region: str | tuple[str, ...] | None = None
    client_id: SecretStr | None = Field(default=None, exclude=True, repr=False)
    client_secret: SecretStr | None = Field(default=None, exclude=True, repr=False)
    node_client_id: SecretStr | None = Field(default=None, exclude=True, repr=False)
    node_client_secret: SecretStr | None = Field(default=None, exclude=True, repr=False)
    image: str | None = None
    os_volume_gb: int = Field(default=100, ge=50)
    ssh_key: str | None = None
    endpoint_url: str | None = None

    @model_validator(mode="after")
    def _node_credentials_are_whole(self) -> Self:
        if (self.node_client_id is None) != (self.node_client_secret is None):
            raise ValueError(
                "node_client_id and node_client_secret are the two halves of one credential: give both, or neither"
            )
        return self

    # ── the verbs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return what can be had now: each type at each location, on demand and as spot. Prices are those of the
        moment, in USD.

        Raises NoCapacity, with the locations that have something, if none of it is at a configured one.
        """
        with self._session() as session:
            types = session.list("/instance-types", currency="usd")
            places = {is_spot: session.list("/instance-availability", is_spot=is_spot) for is_spot in (False, True)}
        wanted = None if self.region is None else {self.region} if isinstance(self.region, str) else set(self.region)
        known = {place["location_code"] for told in places.values() for place in told}
        if wanted is not None and known and not wanted & known:
            raise NoCapacity(
                f"Verda has no machines at {', '.join(sorted(wanted))}; it has some at {', '.join(sorted(known))}"
            )
        sold = {one["instance_type"]: one for one in types if want.instance_type in (None, one["instance_type"])}
        beside = self._beside()
        return [
            offer.model_copy(update={"extras_per_hour": beside})
            for is_spot, told in places.items()
            for place in told
            if wanted is None or place["location_code"] in wanted
            for name in dict.fromkeys(place["availabilities"])
            if name in sold and (offer := _offer(sold[name], place["location_code"], is_spot=is_spot)) is not None
        ]

    def may_sell_spot(self, want: Requirements) -> bool:
        """Spot is listed only while a machine is free."""
        return True

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent machines, a call for each, and wait until they have their addresses; those that come to nothing
        meanwhile are ended and left out.
        """
        key = our_key(self.ssh_key)
        names = {rank: _name(tags, rank) for rank in range(int(tags[RANK_TAG]), int(tags[RANK_TAG]) + count)}
        with self._session() as session:
            order = self._order(session, offer, key)
            script_id = session.make(
                "/scripts",
                _script_name(tags),
                {"script": self._script(session, tags, startup, key)},
                lambda one, name: one["name"] == name,
            )
            made: dict[int, str] = {}
            try:
                made = _create(
                    session,
                    {rank: _order_of(order, name, script_id, of_machine(tags, rank)) for rank, name in names.items()},
                )
                up = _await_addresses(session, made)
            except SkywardError as error:
                # else a machine may be there, and need it
                if isinstance(error, NoCapacity) or not (made or isinstance(error, ProviderFailed)):
                    _remove(session, f"/scripts/{quote(script_id)}")
                raise
            try:
                _sweep(session, session.list("/instances"))
            except SkywardError as error:
                log.warning("old scripts and disks at Verda could not be looked for: %s", error)
        return [
            _instance(up[machine_id], of_machine(tags, rank), key, self._beside(), offer)
            for rank, machine_id in sorted(made.items())
            if machine_id in up
        ]

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the pool's machines at all locations.

        A machine whose address is not known yet, or whose key is not here, has no endpoint.
        """
        with self._session() as session:
            machines = session.list("/instances")
        key = self._key_if_here()
        told = [
            (machine, tags)
            for machine in machines
            if (tags := _tags_of(machine)) is not None and pool_id in (None, tags[POOL_TAG])
        ]
        found = [_instance(machine, tags, key, self._beside()) for machine, tags in told]
        return [instance for instance in found if instance.state is not InstanceState.GONE]

    def terminate(self, ids: Sequence[str]) -> None:
        """Delete machines with their disks and scripts, and what others of ours have left behind.

        Asks again for those that are not up yet.
        """
        if not ids:
            return
        with self._session() as session:
            listed = session.list("/instances")
            known = {machine["id"]: machine for machine in listed}
            hidden = [machine_id for machine_id in dict.fromkeys(ids) if machine_id not in known]
            known |= {
                machine["id"]: machine
                for machine in side_by_side(session.machine, hidden, "skyward-verda")
                if machine is not None
            }
            named = [known[machine_id] for machine_id in dict.fromkeys(ids) if machine_id in known]
            left = _end(
                session, [machine for machine in named if machine["status"] not in ("deleting", "discontinued")]
            )
            try:
                _sweep(session, listed, {machine["hostname"] for machine in named if machine["id"] not in left})
            finally:
                if left:
                    raise _left(left)

    def ends_for_good(self) -> bool:
        """Only with credentials of its own it can delete itself; one that is off is paid for."""
        return self.node_client_id is not None

    def account(self) -> str:
        """Return a name made of the client id, half a credential: a part of its hash.

        Verda tells nothing better, so two credentials of one team are two accounts here.
        """
        with self._session() as session:
            field_of(session.ask("GET", "/balance"), "currency", str, "Verda answered GET /balance")
            return f"client-{hashlib.sha256(session.credentials.client_id.encode()).hexdigest()[:12]}"

    def console_url(self, instance: Instance) -> str | None:
        """Return the front door of the console: no lasting address of one machine's page is documented."""
        return CONSOLE

    # ── what is asked for ────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, session: _Session, offer: Offer, key: Key) -> Json:
        """What the creating calls of one launch have in common."""
        image = self.image or _image(session.list("/images", instance_type=offer.instance_type), offer.accelerator)
        key_name = f"skyward-{hashlib.sha256(key.public.encode()).hexdigest()[:12]}"
        key_id = session.make(
            "/ssh-keys",
            key_name,
            {"key": key.public},
            lambda one, _: one["key"].split()[:2] == key.public.split()[:2],
            is_kept=True,
        )
        # by default it is kept, and paid for
        fate = {"on_spot_discontinue": "delete_permanently"} if offer.is_spot else {}
        return {
            "instance_type": offer.instance_type,
            "image": image,
            "ssh_key_ids": [key_id],
            "location_code": offer.region,
            "os_volume": {"size": self.os_volume_gb, **fate},
            "is_spot": offer.is_spot,
            "contract": "SPOT" if offer.is_spot else "PAY_AS_YOU_GO",
            "pricing": "FIXED_PRICE",
        }

    def _beside(self) -> tuple[Extra, ...]:
        """The disk, which is a thing of its own."""
        return (
            by_month(
                "disk",
                self.os_volume_gb * NVME_USD_PER_GB_MONTH,
                "Verda's price of NVMe, about $0.20 per GB and month",
                "2026-11-20",
            ),
        )

    def _script(self, session: _Session, tags: Tags, startup: str, key: Key) -> str:
        end = "poweroff"
        if self.node_client_id is not None and self.node_client_secret is not None:
            words = (
                session.credentials.url,
                self.node_client_id.get_secret_value(),
                self.node_client_secret.get_secret_value(),
            )
            end = END_BY_ITSELF.format(words=", ".join(map(json.dumps, words)))
        return script(boot_script(startup, tags, "hostname", end), key, host_key(tags[LAUNCH_TAG], key))

    def _key_if_here(self) -> Key | None:
        """Our key; None where it cannot be read, for what is listed can be ended without it."""
        try:
            return our_key(self.ssh_key)
        except BadRequest as error:
            log.warning("machines at Verda are listed without a way to log in: %s", error)
            return None

    def _session(self) -> _Session:
        planted = (self.node_client_id, self.node_client_secret)
        return _Session(self._credentials(), [half.get_secret_value() for half in planted if half is not None])

    def _credentials(self) -> _Credentials:
        """Find the credentials: given, in the environment, in the file of Verda's tools. Raises CredentialsError."""
        environ = os.environ
        given = tuple(
            None if half is None else half.get_secret_value() for half in (self.client_id, self.client_secret)
        )
        pairs = (
            (given[0] or environ.get("VERDA_CLIENT_ID"), given[1] or environ.get("VERDA_CLIENT_SECRET")),
            (environ.get("DATACRUNCH_CLIENT_ID"), environ.get("DATACRUNCH_CLIENT_SECRET")),
        )
        for client_id, client_secret in pairs:
            if client_id and client_secret:
                return _Credentials(client_id, client_secret, self.endpoint_url or URL)
        place = Path(
            environ.get("VERDA_SHARED_CREDENTIALS_FILE")
            or Path(environ.get("VERDA_HOME") or "~/.verda") / "credentials"
        ).expanduser()
        told = _read_credentials(place, environ.get("VERDA_PROFILE") or "default")
        if told.get("verda_client_id") and told.get("verda_client_secret"):
            return _Credentials(
                told["verda_client_id"],
                told["verda_client_secret"],
                self.endpoint_url or told.get("verda_base_url") or URL,
            )
        raise CredentialsError(
            f"no credentials for Verda: set VERDA_CLIENT_ID and VERDA_CLIENT_SECRET, or write them to {place} (`verda"
            f" auth login`). They are made at {CONSOLE}"
        )


# ── a session ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Credentials:
    client_id: str
    client_secret: str
    url: str

    def __repr__(self) -> str:
        return "_Credentials()"


class _TokenRefused(CredentialsError):
    """401: the token has run out, or was never good."""


class _Session:
    """A session with the API, for the length of one verb: a context manager.

    Fetches its token when it is first needed, and once more when it is refused.
    """

    def __init__(self, credentials: _Credentials, planted: Sequence[str] = ()) -> None:
        self.credentials = credentials
        self._api = Api(
            "Verda",
            credentials.url,
            classify=_meaning,
            secrets=(credentials.client_secret, credentials.client_id, *planted),
            says_missing=_says_missing,
        )
        self._token = ""
        self._fetching = threading.Lock()

    def __enter__(self) -> Self:
        self._api.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._api.__exit__()

    def ask(self, method: str, path: str, **how: Any) -> Any:
        """Like `Api.ask`, with a token."""
        token = self._token_but("")
        try:
            return self._api.ask(method, path, **how, headers={"Authorization": f"Bearer {token}"})
        except _TokenRefused:
            token = self._token_but(token)
        try:
            return self._api.ask(method, path, **how, headers={"Authorization": f"Bearer {token}"})
        except _TokenRefused as error:
            raise CredentialsError(str(error)).coded(error.code) from None

    def list(self, path: str, **query: Any) -> list[Json]:
        """Return all of a kind: Verda has no pages."""
        return cast("list[Json]", rows_in(self.ask("GET", path, query=query or None), f"Verda answered GET {path}"))

    def machine(self, machine_id: str) -> Json | None:
        """Return a machine, one that is discontinued as well; None if there is none."""
        path = f"/instances/{quote(machine_id, safe='')}"
        try:
            machine = self.ask("GET", path, missing_is_none=True)
        except BadRequest as error:
            if _speaks_of(str(error), GONE_WORDS):
                return None
            raise
        if machine is not None:
            field_of(machine, "status", str, f"Verda answered GET {path}")
        return machine

    def make(
        self, path: str, name: str, fields: Json, is_it: Callable[[Json, str], bool], *, is_kept: bool = False
    ) -> str:
        """Make an object and return its id.

        One that `is_kept` is made once; one that may be there already, for all we know, is looked for.
        """
        if is_kept and (found := self._look(path, name, is_it)) is not None:
            return found
        try:
            return _id(self.ask("POST", path, body={"name": name, **fields}), path)
        except (ProviderFailed, BadRequest):  # the answer was lost, or another process has made it meanwhile
            if (found := self._look(path, name, is_it)) is None:
                raise
            return found

    def _look(self, path: str, name: str, is_it: Callable[[Json, str], bool]) -> str | None:
        return next((str(one["id"]) for one in self.list(path) if is_it(one, name)), None)

    def _token_but(self, stale: str) -> str:
        """Return a token other than this one. Threads whose token was refused at once fetch one between them."""
        with self._fetching:
            if self._token == stale:
                halves = {"client_id": self.credentials.client_id, "client_secret": self.credentials.client_secret}
                try:
                    told = self._api.ask(
                        "POST", "/oauth2/token", body={"grant_type": "client_credentials", **halves}, is_repeatable=True
                    )
                except (BadRequest, CredentialsError) as error:  # OAuth's word for a wrong secret is 400 as well
                    raise CredentialsError(f"Verda refuses the client id or its secret: {error}").coded(
                        error.code
                    ) from None
                self._token = field_of(told, "access_token", str, "Verda answered POST /oauth2/token")
            return self._token


def _says_missing(body: Mapping[str, Any]) -> bool:
    return body.get("code") == "not_found" and isinstance(body.get("message"), str)


def _meaning(status: int, body: Mapping[str, Any], message: str) -> SkywardError | None:
    told = str(body.get("message", ""))
    if body.get("code") == "insufficient_funds":
        return QuotaExceeded(message)
    if status == HTTPStatus.UNAUTHORIZED:
        return _TokenRefused(message)
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
        if _speaks_of(told, QUOTA_WORDS):
            return QuotaExceeded(message)
        if _speaks_of(told, CAPACITY_WORDS):
            return NoCapacity(message)
    return None


def _read_credentials(place: Path, profile: str) -> Mapping[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(place.read_text(), str(place))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        # its message may hold a line of the file
        raise CredentialsError(f"{place} cannot be read as VERDA_CLIENT_ID's file: {type(error).__name__}") from None
    return parser[profile] if parser.has_section(profile) else {}


# ── creating ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _create(session: _Session, orders: Mapping[int, Json]) -> dict[int, str]:
    """Make a machine of each order, by rank; return the ids of those that were made.

    A call whose outcome is unknown is not repeated: its machine is looked for by name. If there is none at all, raises
    the reason.
    """

    def create(order: Json) -> str | SkywardError:
        try:
            return _id(session.ask("POST", "/instances", body=order), "/instances")
        except SkywardError as error:
            return error

    outcomes = dict(zip(orders, side_by_side(create, list(orders.values()), "skyward-verda"), strict=True))
    made = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, str)}
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, SkywardError)}
    unsure = {
        rank: error
        for rank, error in failures.items()
        if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited)
    }
    if unsure:
        by_name = {machine["hostname"]: machine["id"] for machine in session.list("/instances")}
        made |= {rank: by_name[name] for rank in unsure if (name := orders[rank]["hostname"]) in by_name}
    if made:
        for rank in failures.keys() - made.keys():
            log.warning("Verda did not make the machine of rank %d: %s", rank, failures[rank])
        return made
    error = next(
        iter([*(error for error in unsure.values() if error.code != "service_unavailable"), *failures.values()])
    )
    if error.code == "service_unavailable":  # what Verda says where it has no machine left
        raise NoCapacity(str(error)).coded(error.code) from error
    raise error


def _await_addresses(session: _Session, made: Mapping[int, str]) -> dict[str, Json]:
    """Return the machines, by id, once each has an address or has come to nothing; the latter are ended.

    Raises NoCapacity if none is left.
    """
    up: dict[str, Json] = {}
    failed: dict[str, str] = {}
    deadline = time.monotonic() + ADDRESS_SECONDS
    pause = PAUSE_SECONDS
    while True:
        listed = {machine["id"]: machine for machine in session.list("/instances")}
        waiting = [machine_id for machine_id in made.values() if machine_id not in up and machine_id not in failed]
        for machine_id in waiting:
            machine = listed.get(machine_id) or session.machine(machine_id)  # the list leaves out what is discontinued
            if machine is None:
                continue
            if _state(machine) in (InstanceState.STOPPING, InstanceState.GONE):
                failed[machine_id] = machine["status"]
            elif machine.get("ip"):
                up[machine_id] = machine
        if len(up) + len(failed) == len(made):
            break
        if time.monotonic() + pause > deadline:
            failed |= {
                machine_id: f"no address after {ADDRESS_SECONDS:.0f} s"
                for machine_id in waiting
                if machine_id not in up and machine_id not in failed
            }
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    if failed:
        log.warning("machines at Verda came to nothing: %s", failed)
        left = _end(session, [machine for machine_id in failed if (machine := session.machine(machine_id)) is not None])
        # neither NoCapacity, which says that there is nothing, nor InstancesLeft, which is `terminate`'s: the next
        # provider is asked
        if left and not up:
            raise ProviderFailed(f"none of {len(made)} machines at Verda came up ({failed}): {_left(left)}") from next(
                iter(left.values())
            )
        if left:
            log.warning("and could not be deleted: %s", _left(left))
    if not up:
        words = list(dict.fromkeys(failed.values()))
        raise NoCapacity(f"none of {len(made)} machines at Verda came up: {', '.join(words)}").coded(words[0])
    return up


def _order_of(order: Json, name: str, script_id: str, tags: Tags) -> Json:
    return {
        **order,
        "hostname": name,
        "description": _description(name),
        "startup_script_id": script_id,
        "os_volume": {"name": DISK_PREFIX + name, **order["os_volume"]},
        "tags": _written(tags),
    }


def _image(images: Sequence[Json], accelerator: str | None) -> str:
    """Choose an image's slug: Ubuntu 24.04, for GPUs with the newest CUDA that suits them and Docker, for other
    machines the plain one.
    """
    fitting = [str(image["image_type"]) for image in images if not image.get("is_cluster")]
    if not fitting:
        raise BadRequest("Verda names no image for this type of machine: give one with Verda(image=...)")

    def worth(slug: str) -> tuple[Any, ...]:
        cuda = re.search(r"cuda-?(\d+)\.(\d+)", slug)
        version: tuple[int, ...] = (int(cuda[1]), int(cuda[2])) if cuda else ()
        if accelerator is None:
            return (not cuda, "24.04" in slug, "docker" not in slug)
        suits = version < (13, 0) if accelerator in OLD_CHIPS else version >= (12, 8) or accelerator not in OPEN_CHIPS
        is_open = "open" in slug or not slug.startswith("ubuntu")  # slugs of the newer kind do not say it
        return (
            bool(cuda) and suits,
            accelerator not in OPEN_CHIPS or is_open,
            "jupyter" not in slug,
            "24.04" in slug,
            version,
            "docker" in slug,
        )

    return max(fitting, key=worth)


# ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _end(session: _Session, machines: Sequence[Json]) -> dict[str, SkywardError]:
    """Delete machines with their disks; return those that could not be, with the reason.

    Asks again, all of them in turn, for those that are not up yet.
    """
    wanted = list(machines)
    deadline = time.monotonic() + BUSY_SECONDS
    pause = PAUSE_SECONDS
    left: dict[str, SkywardError] = {}
    while wanted:
        errors = side_by_side(lambda machine: _delete(session, machine), wanted, "skyward-verda")
        failed = {machine["id"]: error for machine, error in zip(wanted, errors, strict=True) if error is not None}
        busy = {machine_id: error for machine_id, error in failed.items() if _speaks_of(str(error), BUSY_WORDS)}
        left |= {machine_id: error for machine_id, error in failed.items() if machine_id not in busy}
        if busy and time.monotonic() + pause > deadline:
            return left | busy
        if busy:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        again = side_by_side(session.machine, list(busy), "skyward-verda")  # it may have its disk by now, or be gone
        wanted = [
            machine
            for machine in again
            if machine is not None and machine["status"] not in ("deleting", "discontinued")
        ]
    return left


def _left(left: Mapping[str, SkywardError]) -> InstancesLeft:
    error = InstancesLeft(
        f"Verda could not delete {', '.join(sorted(left))}: {'; '.join(dict.fromkeys(map(str, left.values())))}",
        sorted(left),
    )
    error.__cause__ = next(iter(left.values()))
    return error


def _delete(session: _Session, machine: Json) -> SkywardError | None:
    # without `volume_ids` the disk goes to the trash, and with an empty list it stays and is paid for
    disk = {"volume_ids": [machine["os_volume_id"]], "delete_permanently": True} if machine.get("os_volume_id") else {}
    body = {"id": [machine["id"]], "action": "delete", **disk}
    try:
        answer = session.ask("PUT", "/instances", body=body, is_repeatable=True, missing_is_none=True)
    except SkywardError as error:
        return None if _speaks_of(str(error), GONE_WORDS) else error
    try:
        told = (
            []
            if answer is None
            else rows_in([answer] if isinstance(answer, dict) and answer else answer, "Verda answered PUT /instances")
        )
    except ProviderFailed as error:
        return error
    for one in told:  # 207: each has a status of its own
        code = int(one.get("statusCode") or 0)
        if (
            (one.get("error") or code >= HTTPStatus.BAD_REQUEST)
            and code != HTTPStatus.NOT_FOUND
            and not _speaks_of(str(one.get("error")), GONE_WORDS)
        ):
            return ProviderFailed(f"{one.get('error') or one.get('status')}").coded(str(code))
    return None


def _sweep(session: _Session, machines: Iterable[Json], ended: Collection[str] = ()) -> None:
    """Delete scripts and disks of ours that serve no machine: those of the machines, by name, that were ended now, and
    those that are old.

    `machines` are all that are listed. A script holds the private half of its machines' host key, in clear text, until
    it is deleted here.
    """
    living = {machine["hostname"] for machine in machines if machine["status"] != "discontinued"} - set(ended)
    serving = {_launch_of(name) for name in living}
    over = {_launch_of(name) for name in ended}
    now = time.time()
    for one in session.list("/scripts"):
        match = SCRIPT_NAME.fullmatch(str(one["name"]))
        launch = (match["pool"], match["launch"]) if match else ("", "")
        if match and launch not in serving and (launch in over or now - int(match["made"]) > ORPHAN_SECONDS):
            _remove(session, f"/scripts/{quote(str(one['id']))}")
    for one in session.list("/volumes"):
        name = str(one["name"]).removeprefix(DISK_PREFIX)
        is_ours = one.get("is_os_volume") and name != one["name"] and NAME.fullmatch(name)
        is_free = (
            one.get("status") == "detached"
            and not one.get("instance_id")
            and not one.get("instances")
            and name not in living
        )
        if is_ours and is_free and (name in ended or now - _seconds(one.get("created_at")) > ORPHAN_SECONDS):
            _remove(session, f"/volumes/{quote(str(one['id']))}", {"is_permanent": True})


def _remove(session: _Session, path: str, body: Json | None = None) -> None:
    """Delete what is not a machine. Whatever is in the way is only told: the next sweep finds it again."""
    try:
        session.ask("DELETE", path, body=body, missing_is_none=True)
    except SkywardError as error:
        log.warning("Verda keeps %s for now: %s", path, error)


# ── between Verda's words and ours ───────────────────────────────────────────────────────────────────────────────────


def _offer(sold: Json, location: str, *, is_spot: bool) -> Offer | None:
    """Return the offer; None if it has no price, is a confidential machine (CUDA is reported broken there), or its chip
    is not in the catalogue.
    """
    on_demand, price = _usd(sold.get("price_per_hour")), _usd(sold.get("spot_price" if is_spot else "price_per_hour"))
    name = str(sold["instance_type"])
    if not price or name.endswith(".CC"):
        return None
    gpu = cast("Json", sold.get("gpu") or {})
    chips = int(gpu.get("number_of_gpus") or 0)
    chip = form_factor = None
    if chips:
        told = re.sub(r"^\d+\s*x\s*|\s*\d+\s*GB$", "", str(gpu.get("description") or sold.get("model") or ""))
        found = re.search(r"\b(SXM|PCIe|NVL)\d*\b", told)
        form_factor = found[1] if found else None
        try:
            chip = find(re.sub(r"\s*\b(SXM|PCIe|NVL)\d*\b", "", told)).name
        except BadRequest:
            log.debug("Verda sells %s with %r, which the catalogue does not know", name, told)
            return None
    return Offer(
        provider=Verda.name,
        instance_type=name,
        region=location,
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=on_demand,
        vcpus=float(sold["cpu"]["number_of_cores"]),
        memory_gb=float(sold["memory"]["size_in_gigabytes"]),
        accelerator=chip,
        accelerators=chips,
        # told for all chips together
        accelerator_memory_gb=float(sold["gpu_memory"]["size_in_gigabytes"]) / chips if chips else None,
        form_factor=form_factor,
        architecture=architecture_beside(chip),
    )


def _instance(
    machine: Json, tags: dict[str, str], key: Key | None, beside: tuple[Extra, ...], offer: Offer | None = None
) -> Instance:
    """Return what Verda tells of a machine; with the offer that it was launched from, at that one's prices."""
    launch, ip = tags.get(LAUNCH_TAG), machine.get("ip")
    price = offer.price_per_hour if offer is not None else _usd(machine.get("price_per_hour")) or 0.0
    is_spot = bool(machine.get("is_spot"))
    endpoint = None
    if ip and key is not None and launch is not None:
        endpoint = Endpoint(
            host=ip,
            port=22,
            user="root",
            key=str(key.path),
            host_key=host_key(launch, key).public,
            known_hosts="/dev/null",
            host_key_grace_seconds=HOST_KEY_SECONDS,
        )
    return Instance(
        id=machine["id"],
        provider=Verda.name,
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=_state(machine),
        region=machine["location"],
        instance_type=machine["instance_type"],
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=offer.on_demand_price_per_hour if offer is not None else None if is_spot else price,
        extras_per_hour=beside,
        ip=ip,
        private_ip=machine.get("private_ip"),
        tags=tags,
        directory=directory_of(machine["hostname"]),
        endpoint=endpoint,
    )


def _state(machine: Json) -> InstanceState:
    return STATES.get(machine["status"], InstanceState.PENDING)


def _tags_of(machine: Json) -> dict[str, str] | None:
    """Return the tags of a machine of ours; None for others.

    One that Verda has not tagged is known by its name and description together.
    """
    tags = {str(tag["key"]): _read(str(tag.get("value") or "")) for tag in machine.get("tags") or ()}
    if POOL_TAG in tags and tags.get(RANK_TAG, "").isdecimal():
        return tags
    match = NAME.fullmatch(machine["hostname"])
    if match is None or machine.get("description") != _description(machine["hostname"]):
        return None
    return {**tags, POOL_TAG: match["pool"], RANK_TAG: match["rank"]}


def _written(tags: Tags) -> list[Json]:
    """Return tags as Verda takes them; values in letters, digits, "." and "-", for it does not say what else passes."""
    words = {
        key: re.sub(r"[^A-Za-z0-9.-]", _escaped, value) for key, value in tags.items() if not key.startswith(WORK_TAG)
    }
    if len(words) < MOST_TAGS and (
        work := " ".join(
            f"{key.removeprefix(WORK_TAG)}:{value}" for key, value in tags.items() if key.startswith(WORK_TAG)
        )
    ):
        # all in one, for there is no room for each, and cut: it is for people, and the ledger has the whole
        words[WORK_TAG.rstrip("-")] = _cut(work)
    long = [key for key, word in words.items() if len(word) > TAG_CHARACTERS]
    if long or len(words) > MOST_TAGS:
        raise BadRequest(
            f"Verda takes {MOST_TAGS} tags of {TAG_CHARACTERS} characters for a machine at most:"
            f" {', '.join(long or words)} is too much"
        )
    return [{"key": key, "value": word} for key, word in words.items()]


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"_{byte:02x}" for byte in found[0].encode())


def _cut(text: str) -> str:
    """Write as much of a text as fits, and no half of a code."""
    word = ""
    for character in text:
        code = re.sub(r"[^A-Za-z0-9.-]", _escaped, character)
        if len(word) + len(code) > TAG_CHARACTERS:
            break
        word += code
    return word


def _read(word: str) -> str:
    return re.sub(
        r"(?:_[0-9a-f]{2})+", lambda found: bytes.fromhex(found[0].replace("_", "")).decode(errors="replace"), word
    )


def _name(tags: Tags, rank: int) -> str:
    """The name of a machine: its own from the start, and found again after a lost answer."""
    return f"{tags[POOL_TAG]}-{rank}-{launch_word(tags)}".lower()


def _script_name(tags: Tags) -> str:
    return f"skyward-{tags[POOL_TAG]}-{launch_word(tags)}-{tags.get(CREATED_TAG, str(int(time.time())))}".lower()


def _launch_of(name: str) -> tuple[str, str]:
    """The pool and the launch that a machine's name tells."""
    match = NAME.fullmatch(name)
    return (match["pool"], match["launch"]) if match else ("", "")


def _description(name: str) -> str:
    return f"skyward {name}"


def _id(answer: object, path: str) -> str:
    """The id in an answer to a creating call: plain text, sometimes in quotes, sometimes a field."""
    told = cast("Json", answer).get("id") if isinstance(answer, dict) else answer
    word = str(told or "").strip().strip('"')
    if not re.fullmatch(r"[\w-]+", word):
        raise ProviderFailed(f"Verda answered POST {path} without an id")
    return word


def _usd(price: object) -> float | None:
    """Read a price, which Verda writes as a string."""
    with contextlib.suppress(TypeError, ValueError):
        return float(cast("str", price))
    return None


def _seconds(moment: object) -> float:
    """Seconds since 1970 of a moment as Verda writes it; now if it cannot be read, so that nothing looks old."""
    with contextlib.suppress(ValueError):
        told = datetime.fromisoformat(str(moment))
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
    return time.time()


def _speaks_of(text: str, words: Sequence[str]) -> bool:
    told = text.lower().replace("’", "'")
    return any(word in told for word in words)
