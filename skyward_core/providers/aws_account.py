"""Calls to AWS, and the meaning of its answers: clients, errors, states."""

from __future__ import annotations

import difflib
import functools
import importlib
import math
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Self, cast

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    LEAST_LIKENESS,
    BadRequest,
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
    without_logins,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.providers import _http
from skyward_core.shown_text import visible_logger

PAGE = 100
MOST_THREADS = 8
CONNECT_SECONDS, READ_SECONDS = 10, 30
ATTEMPTS = 5

STATES: Mapping[str, InstanceState] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.STOPPING,  # its disk is still billed
    # This state is final and is not billed (EC2 guide, "Instance lifecycle"). A large machine stays in it for minutes.
    "shutting-down": InstanceState.GONE,
    "terminated": InstanceState.GONE,
}
"""A state that is not in this table counts as PENDING: the machine exists and must be terminated."""

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

The part of a code after a dot is ignored. A status 5xx with another code is an outage.
"""

RIGHTS = re.compile(r"UnauthorizedOperation|AccessDenied(Exception)?")
"""Codes for right credentials that may not do this. All others of CredentialsError are about the credentials."""
SPOT_ROLE, SPOT_ROLE_TEXT = "AuthFailure.ServiceLinkedRoleCreationNotPermitted", "service-linked role for EC2 Spot"
"""Refusal of the first spot machine of an account whose credentials may not create the role that spot needs."""
SPOT_ROLE_ADVICE = (
    "Somebody with the right to do so creates it once for the account: aws iam create-service-linked-role"
    " --aws-service-name spot.amazonaws.com"
)
FREE_PLAN_TEXT = "not eligible for Free Tier"
"""In the refusal of a type by an account on AWS's free plan (InvalidParameterCombination, reported since 2025)."""
FREE_PLAN_ADVICE = (
    "The account is on AWS's free plan, which rents a few small types without GPU: upgrade it to the paid plan at"
    " https://console.aws.amazon.com/billing/home#/freetier"
)
SOURCES: Mapping[str, str] = {
    "explicit": "access_key_id= and secret_access_key=",
    "env": "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "shared-credentials-file": "the file ~/.aws/credentials",
    "config-file": "the file ~/.aws/config",
    "sso": "the SSO login",
    "login": "the login of `aws login`",
    "assume-role": "the role of the profile",
    "custom-process": "the profile's credential_process",
    "iam-role": "the role of this machine",
    "container-role": "the role of this container",
}
"""Where the SDK has found the credentials, by its own word for it."""
NO_CREDENTIALS = (
    "no credentials for AWS: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in"
    " (`aws configure`, `aws sso login`)"
)

log = visible_logger(__name__)


@functools.cache
def _models() -> Any:
    """Return the SDK's loader of service descriptions. Reading EC2's takes 0.1 s, once in each process."""
    return importlib.import_module("botocore.loaders").create_loader()


class AwsAccount:
    """Calls to AWS during one method of the provider: a context manager.

    Failures become our errors. The SDK retries requests, except those with `once`.
    """

    def __init__(self, profile: str | None, endpoint_url: str | None, keys: tuple[str, str, str | None] | None) -> None:
        """Use a profile, or these keys: id, secret and session token."""
        try:
            self._sdk = importlib.import_module("botocore.session")
        except ModuleNotFoundError as error:
            raise BadRequest("provider aws needs AWS's SDK: pip install boto3") from error
        self._endpoint_url = endpoint_url
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._lock = threading.Lock()
        self._secrets: tuple[str, ...] = ()
        self._source = ""
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
        with self._translated(f"{service} {operation} in {region}", region):
            return getattr(self._client(region, service, once=once), operation)(**words)

    def pages(self, region: str, service: str, operation: str, what: str, **words: Any) -> list[Any]:
        """Return the items of all pages of a list."""
        with self._translated(f"{service} {operation} in {region}", region):
            pages = (
                self._client(region, service)
                .get_paginator(operation)
                .paginate(PaginationConfig={"PageSize": PAGE}, **words)
            )
            return [item for page in pages for item in page[what]]

    def machines(self, region: str, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the machines that pass a filter, terminated ones included."""
        reservations = self.pages(region, "ec2", "describe_instances", "Reservations", Filters=[wanted])
        return [machine for reservation in reservations for machine in reservation["Instances"]]

    def wait_for(self, region: str, what: str, **words: Any) -> None:
        with self._translated(f"waiting for {what} in {region}", region):
            self._client(region, "ec2").get_waiter(what).wait(WaiterConfig={"Delay": 1, "MaxAttempts": 20}, **words)

    def endpoint(self, region: str, service: str) -> str:
        """Return the URL of a service."""
        return str(self._client(region, service).meta.endpoint_url)

    def _client(self, region: str, service: str, *, once: bool = False) -> Any:
        with self._lock:  # a client may be used, but not created, by several threads at once
            if (region, service, once) not in self._clients:
                if not self._clients and (credentials := self._session.get_credentials()) is not None:
                    frozen = credentials.get_frozen_credentials()
                    self._secrets = tuple(secret for secret in (frozen.secret_key, frozen.token) if secret)
                    self._source = SOURCES.get(str(credentials.method), str(credentials.method))
                    self._source += f" (profile {self._session.profile})" if self._session.profile else ""
                # InsufficientInstanceCapacity is a 500: the SDK would retry the same zone for seconds (measured, fact
                # sheet 1.4)
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

    def missing_credentials(self) -> str:
        """Return what is missing; "" if the SDK finds credentials, right or wrong. On a machine of AWS it asks that
        machine's metadata service.
        """
        try:
            with self._translated("the credentials"):
                return "" if self._session.get_credentials() is not None else NO_CREDENTIALS
        except SkywardError as error:
            return str(error)

    @contextmanager
    def _translated(self, what: str, region: str = "") -> Generator[None]:
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
            answer, cause = error.response.get("Error", {}), error
            code = str(answer.get("Code", ""))
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            message = f"AWS answered {what} with {code}: {answer.get('Message', '')}"
            text = self._clean(message)
            # SignatureDoesNotMatch repeats the signed text, which may have a session token: then the cause is left out
            raise self.refusal(code, status, text[: _http.QUOTED_CHARACTERS]) from (cause if text == message else None)
        except refused as error:
            kind, code, cause = CredentialsError, "", error
            message = f"{NO_CREDENTIALS}: {error}"
        except (kinds.HTTPClientError, kinds.ConnectionError, kinds.WaiterError, garbled) as error:
            kind, code, cause, message = ProviderFailed, "", error, f"AWS did not answer {what}: {error}"
            if isinstance(error, kinds.EndpointConnectionError):
                message += self._unlisted(region)
        except (kinds.BotoCoreError, ValueError) as error:
            kind, code, cause, message = BadRequest, "", error, f"AWS cannot be called for {what}: {error}"
        text = self._clean(message)
        raise kind(text[: _http.QUOTED_CHARACTERS]).coded(code) from (cause if text == message else None)

    def _unlisted(self, region: str) -> str:
        """Return what is odd about a region that cannot be reached; "" for one that the SDK lists.

        A region may be newer than the SDK, so that this is no reason to refuse it before.
        """
        partitions = self._session.get_available_partitions()
        listed = {name for part in partitions for name in self._session.get_available_regions("ec2", part)}
        if not region or region in listed:
            return ""
        near = difflib.get_close_matches(region, sorted(listed), 3, cutoff=LEAST_LIKENESS)
        return f"; the SDK lists no region {region!r}" + (f" (near it: {', '.join(sorted(near))})" if near else "")

    def _clean(self, message: str) -> str:
        text = functools.reduce(lambda text, secret: text.replace(secret, "***"), self._secrets, message)
        return without_logins(text)

    def refusal(self, code: str, status: int, message: str) -> SkywardError:
        """Return the error for an answer of AWS, with what the user does next."""
        error = failure(code, status, message)
        if error.advice or not isinstance(error, CredentialsError):
            return error
        if RIGHTS.fullmatch(code.partition(".")[0]):
            return error.advised(
                f"The credentials of {self._source} lack this right: docs/clouds/aws.md has the policy to attach"
            )
        return error.advised(f"The credentials of {self._source} are refused: replace them, or log in again")


def failure(code: str, status: int, message: str) -> SkywardError:
    """Return the error for a code of AWS. What an account lacks before its first machine is named, with the cure."""
    if code == SPOT_ROLE or SPOT_ROLE_TEXT in message:
        error = CredentialsError(message).coded(code).advised(SPOT_ROLE_ADVICE)
        error.is_about_spot = True
        return error
    if FREE_PLAN_TEXT in message:
        return QuotaExceeded(message).coded(code).advised(FREE_PLAN_ADVICE)
    return meaning(code, status)(message).coded(code)


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
    """Collect the error of one step, so that the next step runs."""
    try:
        yield
    except SkywardError as error:
        failures.append(error)


def each[T, R](things: Sequence[T], ask: Callable[[T], R]) -> list[R]:
    """Call `ask` for each thing, at once; return the results in order. Raises the first failure when all have ended."""
    return side_by_side(ask, things, "skyward-aws", MOST_THREADS)


def each_region[R](regions: Sequence[str], ask: Callable[[str], R]) -> tuple[list[R], dict[str, SkywardError]]:
    """Call `ask` for each region, at once; return the results, and the errors of the other regions.

    The caller must not use this to find machines: a region that does not answer may have some. An error is raised if
    neither other credentials nor a later try can help.
    """

    def answer(region: str) -> tuple[R | None, SkywardError | None]:
        try:
            return ask(region), None
        except (CredentialsError, NoCapacity, ProviderFailed) as error:
            return None, error

    answers = dict(zip(regions, each(regions, answer), strict=True))
    failures = {region: error for region, (_, error) in answers.items() if error is not None}
    return [cast("R", found) for found, error in answers.values() if error is None], failures


def each_enabled[R](account: AwsAccount, regions: Sequence[str], ask: Callable[[str], R]) -> list[R]:
    """Call `ask` for each region, to find machines; return the results of the regions that the account has enabled.

    Any other failure is raised.
    """
    answers, failures = each_region(regions, ask)
    for region in not_enabled(account, regions, failures):
        del failures[region]
    if failures:
        raise next(iter(failures.values()))
    return answers


def not_enabled(account: AwsAccount, regions: Sequence[str], failures: Mapping[str, SkywardError]) -> set[str]:
    """Return those of the failed regions that AWS reports as not enabled in the account; they can have no machines.

    One of the regions that have answered is queried. If it does not answer, the result is empty, because a region with
    an outage may have machines.
    """
    refused = sorted(region for region, error in failures.items() if isinstance(error, CredentialsError))
    witness = next((region for region in regions if region not in failures), None)
    if not refused or witness is None:
        return set()
    try:
        found = account.ask(witness, "ec2", "describe_regions", RegionNames=refused, AllRegions=True)["Regions"]
    except SkywardError as error:
        log.warning("%s does not report whether %s is enabled in the account: %s", witness, ", ".join(refused), error)
        return set()
    closed = {str(region["RegionName"]) for region in found if region.get("OptInStatus") == "not-opted-in"} & set(
        refused
    )
    for region in sorted(closed):
        log.warning(
            "%s is not enabled in the AWS account, so no machine is looked for there: remove it from region=, or"
            " enable it",
            region,
        )
    return closed


def why_no_region(failures: Mapping[str, SkywardError]) -> SkywardError:
    """Return the error to raise if all regions, or all that matter, have failed: one that names each failure.

    It is NoCapacity only if all errors are; otherwise its type is that of the first other error.
    """
    errors = list(failures.values())
    worst = next((error for error in errors if not isinstance(error, NoCapacity)), errors[0])
    texts = list(dict.fromkeys(str(error) for error in errors))
    return worst if len(texts) == 1 else type(worst)("; ".join(texts)).coded(worst.code)


def state_of(machine: Mapping[str, Any]) -> InstanceState:
    return STATES.get(machine["State"]["Name"], InstanceState.PENDING)


def terminated(account: AwsAccount, region: str, ids: Sequence[str]) -> tuple[set[str], dict[str, SkywardError]]:
    """Terminate machines; return the ids that were accepted, and the errors of others. Unknown ids are in neither.

    One id that is unknown or refused fails the whole call (fact sheet, 1.5). Then each id gets its own call.
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


def pairs_of(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": name, "Value": value} for name, value in tags.items()]


def tags_of(thing: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in thing.get("Tags", [])}


def number(text: object) -> float | None:
    try:
        found = float(str(text))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────────────────────────

IN_VCPUS = re.compile(r"VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded")
"""The refusals that are about these quotas. Others are about disks, addresses and the like."""
ON_DEMAND: Mapping[str, tuple[str, str]] = {
    "standard": ("L-1216C47A", "Running On-Demand Standard instances"),
    "g": ("L-DB2E81BA", "Running On-Demand G and VT instances"),
    "p": ("L-417A185B", "Running On-Demand P instances"),
    "dl": ("L-6E869C2A", "Running On-Demand DL instances"),
    "inf": ("L-1945791B", "Running On-Demand Inf instances"),
    "trn": ("L-2C3B7624", "Running On-Demand Trn instances"),
}
SPOT: Mapping[str, tuple[str, str]] = {
    "standard": ("L-34B43A08", "All Standard Spot Instance Requests"),
    "g": ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    "p": ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    "p5": ("L-C4BD4855", "All P5 Spot Instance Requests"),
    "dl": ("L-85EED4F7", "All DL Spot Instance Requests"),
    "inf": ("L-B5D1601B", "All Inf Spot Instance Requests"),
    "trn": ("L-6B0D517C", "All Trn Spot Instance Requests"),
}
FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), "standard"),
    **dict.fromkeys(("g", "gr", "vt"), "g"),
    **{letters: letters for letters in ("p", "dl", "inf", "trn")},
}
"""The group of a family, by the letters before its generation."""


def quota_of(instance_type: str, *, is_spot: bool) -> tuple[str, str]:
    """Return code and name of the quota that a type counts against; ("", "") if they are not known here."""
    match = re.match(r"([a-z]+)([0-9]+)", instance_type)
    group = FAMILIES.get(match[1], "") if match else ""
    if match and is_spot and group == "p" and int(match[2]) >= 5:
        group = f"p{match[2]}"  # newer P families have a quota of their own as spot
    return (SPOT if is_spot else ON_DEMAND).get(group, ("", ""))


def advised_of_quota(error: QuotaExceeded, instance_type: str, region: str, *, is_spot: bool) -> QuotaExceeded:
    """Add to a refusal the quota that it is about, and the console's page where more is asked for."""
    page = f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
    if not IN_VCPUS.fullmatch(error.code):
        return error.advised(f"The account's limits are at {page}")
    code, name = quota_of(instance_type, is_spot=is_spot)
    what = f"The quota is {code}, {name}, in vCPUs of {region}" if code else f"The quota counts vCPUs of {region}"
    return error.advised(f"{what}: new accounts often have 0. Ask for more at {page}{f'/{code}' if code else ''}")
