"""What is asked of AWS, and what its answers mean: sessions, errors, states."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Self, cast

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.providers import _http

PAGE = 100
MOST_THREADS = 8
CONNECT_SECONDS, READ_SECONDS = 10, 30
ATTEMPTS = 5

STATES: Mapping[str, InstanceState] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.STOPPING,  # its disk is paid for
    # Nothing leads back from it, and it is not billed (EC2 guide, "Instance lifecycle"); a large machine stays in it
    # for minutes.
    "shutting-down": InstanceState.GONE,
    "terminated": InstanceState.GONE,
}
"""A state that is not here is PENDING: the machine is there, and must be ended."""

COMING = (InstanceState.PENDING, InstanceState.RUNNING)

MEANINGS: Mapping[type[SkywardError], str] = {
    NoCapacity: (
        r"Insufficient(Instance|Host|ReservedInstance)?Capacity|UnfulfillableCapacity|Unsupported|ReservationCapacityExceeded"
        r"|InsufficientFreeAddressesInSubnet|SpotMaxPriceTooLow|SpotInstance(Termination|Shutdown)"
    ),
    QuotaExceeded: (
        r"(Vcpu|Instance|Volume|Address|NetworkInterface|MaxIOPS)LimitExceeded|Max(SpotInstance|Fleet)CountExceeded"
    ),
    CredentialsError: (
        r"AuthFailure|UnauthorizedOperation|AccessDenied(Exception)?|OptInRequired|ExpiredToken(Exception)?|RequestExpired|Blocked"
        r"|InvalidClientTokenId|InvalidAccessKeyId|UnrecognizedClientException|SignatureDoesNotMatch|InvalidSignatureException|IncompleteSignature"
        r"|MissingAuthenticationToken|PendingVerification"
    ),
    RateLimited: (
        r"RequestLimitExceeded|(Request)?Throttl(ing|ed)(Exception)?|SlowDown|EC2ThrottledException|TooManyRequestsException"
    ),
}
"""Error codes of EC2, SSM, STS and the price list (fact sheet, 0.2).

What follows a dot in a code counts for nothing; a 5xx with another code is an outage.
"""

log = logging.getLogger(__name__)


@functools.cache
def _models() -> Any:
    """The SDK's descriptions of the services, which are read from files: 0.1 s for EC2's, paid once a process."""
    return importlib.import_module("botocore.loaders").create_loader()


class Account:
    """What is asked of AWS in one verb: a context manager.

    Failures become our errors; requests are repeated by the SDK, those said `once` are not.
    """

    def __init__(self, profile: str | None, endpoint_url: str | None, keys: tuple[str, str, str | None] | None) -> None:
        """Begin as a profile, or with the keys given: id, secret and session token."""
        try:
            self._sdk = importlib.import_module("botocore.session")
        except ModuleNotFoundError as error:
            raise BadRequest("provider aws needs AWS's SDK: pip install 'skyward-core[aws]'") from error
        self._endpoint_url = endpoint_url
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._lock = threading.Lock()
        self._secrets: tuple[str, ...] = ()
        self._session = self._sdk.Session(profile=profile)
        self._session.register_component("data_loader", _models())
        if keys is not None:
            self._session.set_credentials(*keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def ask(self, region: str, service: str, operation: str, *, once: bool = False, **words: Any) -> dict[str, Any]:
        with self._translated(f"{service} {operation} in {region}"):
            return getattr(self._client(region, service, once=once), operation)(**words)

    def pages(self, region: str, service: str, operation: str, what: str, **words: Any) -> list[Any]:
        """Ask for all pages of a list."""
        with self._translated(f"{service} {operation} in {region}"):
            pages = (
                self._client(region, service)
                .get_paginator(operation)
                .paginate(PaginationConfig={"PageSize": PAGE}, **words)
            )
            return [item for page in pages for item in page[what]]

    def machines(self, region: str, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the machines that pass a filter, ended ones too."""
        reservations = self.pages(region, "ec2", "describe_instances", "Reservations", Filters=[wanted])
        return [machine for reservation in reservations for machine in reservation["Instances"]]

    def wait_for(self, region: str, what: str, **words: Any) -> None:
        with self._translated(f"waiting for {what} in {region}"):
            self._client(region, "ec2").get_waiter(what).wait(WaiterConfig={"Delay": 1, "MaxAttempts": 20}, **words)

    def endpoint(self, region: str, service: str) -> str:
        """Return where a service is asked."""
        return str(self._client(region, service).meta.endpoint_url)

    def _client(self, region: str, service: str, *, once: bool = False) -> Any:
        with self._lock:  # making clients is not for several threads; using them is
            if (region, service, once) not in self._clients:
                if not self._clients and (credentials := self._session.get_credentials()) is not None:
                    frozen = credentials.get_frozen_credentials()
                    self._secrets = tuple(secret for secret in (frozen.secret_key, frozen.token) if secret)
                # InsufficientInstanceCapacity is a 500: the SDK would ask the same zone again for seconds (measured,
                # fact sheet 1.4)
                settings = importlib.import_module("botocore.config").Config(
                    retries={"mode": "standard", "total_max_attempts": 1 if once else ATTEMPTS},
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    max_pool_connections=MOST_THREADS,
                )
                self._clients[region, service, once] = self._session.create_client(
                    service, region_name=region, endpoint_url=self._endpoint_url, config=settings
                )
            return self._clients[region, service, once]

    @contextmanager
    def _translated(self, what: str) -> Generator[None]:
        kinds = importlib.import_module("botocore.exceptions")
        garbled = importlib.import_module("botocore.parsers").ResponseParserError
        refused = (
            kinds.NoCredentialsError,
            kinds.PartialCredentialsError,
            kinds.CredentialRetrievalError,
            kinds.ProfileNotFound,
            kinds.SSOError,
            kinds.TokenRetrievalError,
            kinds.NoAuthTokenError,
        )
        try:
            yield
            return
        except kinds.ClientError as error:
            told, cause = error.response.get("Error", {}), error
            code = str(told.get("Code", ""))
            kind = meaning(code, error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            message = f"AWS answered {what} with {code}: {told.get('Message', '')}"
        except refused as error:
            kind, code, cause = CredentialsError, "", error
            message = (
                "no credentials for AWS: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in "
            )
            message += f"(`aws configure`, `aws sso login`): {error}"
        except (kinds.HTTPClientError, kinds.ConnectionError, kinds.WaiterError, garbled) as error:
            kind, code, cause, message = ProviderFailed, "", error, f"AWS did not answer {what}: {error}"
        except (kinds.BotoCoreError, ValueError) as error:
            kind, code, cause, message = BadRequest, "", error, f"AWS cannot be asked {what}: {error}"
        text = functools.reduce(lambda text, secret: text.replace(secret, "***"), self._secrets, message)
        # SignatureDoesNotMatch repeats what was signed, a session token too: then its cause is not told either
        raise kind(text[: _http.QUOTED_CHARACTERS]).coded(code) from (cause if text == message else None)


def meaning(code: str, status: int) -> type[SkywardError]:
    head = code.partition(".")[0]
    for kind, codes in MEANINGS.items():
        if re.fullmatch(codes, head):
            return kind
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return RateLimited
    return ProviderFailed if status >= HTTPStatus.INTERNAL_SERVER_ERROR else BadRequest


@contextmanager
def collected(failures: list[SkywardError]) -> Generator[None]:
    """Keep what one step fails with, so that the next one is taken."""
    try:
        yield
    except SkywardError as error:
        failures.append(error)


def each[T, R](things: Sequence[T], ask: Callable[[T], R]) -> list[R]:
    """Ask about several things at once; the answers in their order. Raises the first failure when all are through."""
    return side_by_side(ask, things, "skyward-aws", MOST_THREADS)


def each_region[R](regions: Sequence[str], ask: Callable[[str], R]) -> tuple[list[R], dict[str, SkywardError]]:
    """Ask regions of which one may be done without, all at once; return the answers, and what was in the way of the
    others, which the log tells.

    Not for machines that may be there: a region that cannot be asked for those is no empty one. What neither
    credentials nor waiting may mend is raised.
    """

    def answer(region: str) -> tuple[R | None, SkywardError | None]:
        try:
            return ask(region), None
        except (CredentialsError, NoCapacity, ProviderFailed) as error:
            return None, error

    told = dict(zip(regions, each(regions, answer), strict=True))
    failures = {region: error for region, (_, error) in told.items() if error is not None}
    return [cast("R", found) for found, error in told.values() if error is None], failures


def each_enabled[R](account: Account, regions: Sequence[str], ask: Callable[[str], R]) -> list[R]:
    """Ask all regions for machines that may be there; return the answers of those that the account has enabled.

    Any other failure is raised.
    """
    answers, failures = each_region(regions, ask)
    for region in not_enabled(account, regions, failures):
        del failures[region]
    if failures:
        raise next(iter(failures.values()))
    return answers


def not_enabled(account: Account, regions: Sequence[str], failures: Mapping[str, SkywardError]) -> set[str]:
    """Return which of the regions that have failed the account has not enabled, in the words of AWS: no machine can be
    made, listed or ended there.

    One of the regions that have answered is asked. Nothing is returned if it does not say so: a region that is out is
    no empty one.
    """
    refused = sorted(region for region, error in failures.items() if isinstance(error, CredentialsError))
    witness = next((region for region in regions if region not in failures), None)
    if not refused or witness is None:
        return set()
    try:
        told = account.ask(witness, "ec2", "describe_regions", RegionNames=refused, AllRegions=True)["Regions"]
    except SkywardError as error:
        log.warning("%s does not say whether %s is enabled in the account: %s", witness, ", ".join(refused), error)
        return set()
    closed = {str(region["RegionName"]) for region in told if region.get("OptInStatus") == "not-opted-in"} & set(
        refused
    )
    for region in sorted(closed):
        log.warning(
            "%s is not enabled in the AWS account, so no machine is looked for there: take it out of region=, or"
            " enable it",
            region,
        )
    return closed


def why_no_region(failures: Mapping[str, SkywardError]) -> SkywardError:
    """Return what to raise where all regions, or all that count, have failed: the error of the only one, or one that
    tells of each.

    Its kind is that of the first; none is told as sold out as long as another could not be asked.
    """
    errors = list(failures.values())
    worst = next((error for error in errors if not isinstance(error, NoCapacity)), errors[0])
    texts = list(dict.fromkeys(str(error) for error in errors))
    return worst if len(texts) == 1 else type(worst)("; ".join(texts)).coded(worst.code)


def state_of(machine: Mapping[str, Any]) -> InstanceState:
    return STATES.get(machine["State"]["Name"], InstanceState.PENDING)


def terminated(account: Account, region: str, ids: Sequence[str]) -> tuple[set[str], dict[str, SkywardError]]:
    """Ask for the end of machines; return those that were ended, and what is in the way of others. What the region does
    not know is in neither.

    One id that it does not know, or refuses to end, fails the whole call (fact sheet, 1.5): then each is asked for
    alone.
    """
    try:
        account.ask(region, "ec2", "terminate_instances", InstanceIds=list(ids))
        return set(ids), {}
    except BadRequest as error:
        if len(ids) > 1:
            parts = each(ids, lambda machine_id: terminated(account, region, [machine_id]))
            return {machine_id for done, _ in parts for machine_id in done}, dict(
                item for _, failed in parts for item in failed.items()
            )
        return set(), {} if error.code.startswith("InvalidInstanceID.") else {ids[0]: error}
    except SkywardError as error:
        return set(), dict.fromkeys(ids, error)


def number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None
