"""What a real account has and lacks before its first machine: for `make live`, by requests that cost nothing.

Each cloud has a function that yields findings. A finding that is not good says what to do. What cannot be found out is
a finding too, and no failure: a key with few rights may still rent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

import skyward_core as sky
from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.providers import runpod
from skyward_core.providers._http import Api
from skyward_core.providers.aws import AWS
from skyward_core.providers.aws_account import ON_DEMAND, SPOT, AwsAccount
from skyward_core.providers.aws_launch import DEBIAN_ARCHITECTURES, NEURON_IMAGE, NVIDIA_IMAGE, UBUNTU_IMAGE
from skyward_core.providers.base import POOL_TAG
from skyward_core.providers.digitalocean import AMD_IMAGE, CPU_IMAGE, NVIDIA_8_IMAGE, DigitalOcean
from skyward_core.providers.digitalocean import NVIDIA_IMAGE as GPU_IMAGE
from skyward_core.providers.vastai import VastAI

REGISTRY, REGISTRY_TOKENS = "https://registry-1.docker.io", "https://auth.docker.io"
MANIFESTS = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
SPOT_ROLE = "AWSServiceRoleForEC2Spot"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. The verdict is "?" if it could not be found out."""

    name: str
    verdict: Literal["ok", "NO", "?"]
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:3} {self.name}: {self.text}"


def findings(provider: sky.Provider) -> Iterator[Finding]:
    """Yield what is known of the provider's account. No request creates or changes anything."""
    if isinstance(provider, AWS):
        yield from _aws(provider)
    elif isinstance(provider, DigitalOcean):
        yield from _digitalocean(provider)
    elif isinstance(provider, runpod.RunPod):
        yield from _runpod(provider)
    else:
        yield from _quotas(provider)
    if isinstance(provider, VastAI):
        yield _manifest(provider.image)


def _looked(name: str, look: Callable[[], str]) -> Finding:
    """Return the finding of one request: refused credentials and missing objects are not good, an outage is unknown."""
    try:
        return Finding(name, "ok", look())
    except (CredentialsError, BadRequest) as error:
        return Finding(name, "NO", str(error))
    except SkywardError as error:
        return Finding(name, "?", str(error))


def _quotas(provider: sky.Provider) -> Iterator[Finding]:
    try:
        quotas = provider.quotas()
    except SkywardError as error:
        yield Finding("limits", "?", str(error))
        return
    for name, value in quotas.items():
        yield Finding(name, "ok" if value > 0 else "NO", f"{value:g}")


# ── AWS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _aws(provider: AWS) -> Iterator[Finding]:
    with provider._account() as account:
        for region in provider._regions:
            image = ""
            for name in _parameters():
                found = _looked(f"image in {region}", lambda name=name: _image(account, region, name))
                image = image or (found.text.split()[0] if found.verdict == "ok" and "canonical" in name else "")
                yield found
            yield _looked(f"right to rent in {region}", lambda image=image: _dry_run(account, region, image))
            yield _spot_role(account, region)
            yield from _vcpus(account, region)


def _parameters() -> Iterator[str]:
    for architecture, debian in DEBIAN_ARCHITECTURES.items():
        yield UBUNTU_IMAGE.format(debian_architecture=debian)
        yield NVIDIA_IMAGE.format(architecture=architecture)
    yield NEURON_IMAGE


def _image(account: AwsAccount, region: str, parameter: str) -> str:
    image = str(account.ask(region, "ssm", "get_parameter", Name=parameter)["Parameter"]["Value"])
    if not account.ask(region, "ec2", "describe_images", ImageIds=[image])["Images"]:
        raise BadRequest(f"{parameter} is {image}, which does not exist")
    return f"{image} ({parameter})"


def _dry_run(account: AwsAccount, region: str, image: str) -> str:
    """Ask whether a machine could be created: DryRun checks the rights, and neither quota nor capacity."""
    # as a launch does: the policy of docs/clouds/aws.md allows nothing without the tag
    kinds = ("instance", "volume", "network-interface")
    tags = [{"ResourceType": kind, "Tags": [{"Key": POOL_TAG, "Value": "dry-run"}]} for kind in kinds]
    order = {"ImageId": image, "InstanceType": "t3.micro", "MinCount": 1, "MaxCount": 1, "TagSpecifications": tags}
    try:
        account.ask(region, "ec2", "run_instances", once=True, DryRun=True, **order)
    except BadRequest as error:
        if error.code != "DryRunOperation":
            raise
        return "RunInstances would have succeeded"
    raise ProviderFailed("the dry run of RunInstances was answered like a real one: look for a machine")


def _spot_role(account: AwsAccount, region: str) -> Finding:
    name = "role for spot"
    try:
        account.ask(region, "iam", "get_role", RoleName=SPOT_ROLE)
    except BadRequest as error:
        if not error.code.startswith("NoSuchEntity"):
            return Finding(name, "?", str(error))
        command = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
        return Finding(name, "NO", f"the account has none: {command}")
    except SkywardError as error:
        return Finding(name, "?", str(error))
    return Finding(name, "ok", SPOT_ROLE)


def _vcpus(account: AwsAccount, region: str) -> Iterator[Finding]:
    for code, name in (*ON_DEMAND.values(), *SPOT.values()):
        what = f"{code} in {region}"
        try:
            answer = account.ask(region, "service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=code)
        except SkywardError as error:
            yield Finding(what, "?", str(error))
            continue
        vcpus = float(answer["Quota"]["Value"])
        page = f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/{code}"
        text = f"{vcpus:g} vCPUs, {answer['Quota'].get('QuotaName', name)}"
        yield Finding(what, "ok", text) if vcpus else Finding(what, "NO", f"{text}: ask for more at {page}")


# ── DigitalOcean ─────────────────────────────────────────────────────────────────────────────────────────────────────

SCOPES: Mapping[str, str] = {
    "account:read": "/v2/account",
    "sizes:read": "/v2/sizes",
    "regions:read": "/v2/regions",
    "image:read": "/v2/images",
    "vpc:read": "/v2/vpcs",
    "actions:read": "/v2/actions",
    "droplet:read": "/v2/droplets",
    "ssh_key:read": "/v2/account/keys",
    "tag:read": "/v2/tags",
}
"""The scopes to read, each with a request that needs it. Those to write cannot be looked at without writing."""


def _digitalocean(provider: DigitalOcean) -> Iterator[Finding]:
    with provider._api() as api:
        status = str(provider._account().get("status"))
        yield Finding("account", "ok" if status == "active" else "NO", status)
        yield from _quotas(provider)
        yield Finding("limit of GPU droplets", "?", "the API does not tell it; a new account has 0")
        for scope, path in SCOPES.items():
            yield _looked(f"scope {scope}", lambda path=path: _got(api, path))
        for slug in (CPU_IMAGE, GPU_IMAGE, NVIDIA_8_IMAGE, AMD_IMAGE):
            yield _looked("image", lambda slug=slug: _got(api, f"/v2/images/{slug}"))


def _got(api: Api, path: str) -> str:
    api.request("GET", path, query={"per_page": 1})
    return f"GET {path} is answered"


# ── containers ───────────────────────────────────────────────────────────────────────────────────────────────────────

BALANCE = "query { myself { clientBalance currentSpendPerHr spendLimit } }"


def _runpod(provider: runpod.RunPod) -> Iterator[Finding]:
    with provider._api() as api:
        yield _looked("right to write", lambda: _may_write(api))
        yield _looked("balance", lambda: _balance(api))
    for image in (runpod.NVIDIA_IMAGE, runpod.AMD_IMAGE, runpod.CPU_IMAGE):
        yield _manifest(image)


def _may_write(api: Api) -> str:
    """Delete a pod that does not exist: a key that may only read is refused, for any other there is none."""
    api.request("DELETE", "/v2/pods/skyward-does-not-exist", missing_is_none=True)
    return "the key may write"


def _balance(api: Api) -> str:
    answer = api.request("POST", "/graphql", body={"query": BALANCE}, is_repeatable=True)
    account = answer.get("data", {}).get("myself") if isinstance(answer, dict) else None
    if not account:
        raise ProviderFailed("RunPod does not tell the balance")
    if float(account["clientBalance"]) <= 0:
        raise BadRequest(f"{account['clientBalance']} USD: add credit")
    return f"{account['clientBalance']} USD, at most {account['spendLimit']} USD an hour"


def _manifest(image: str) -> Finding:
    """Return whether Docker Hub has an image: a tag that was deleted is a machine that never starts."""
    name, _, tag = image.rpartition(":")
    repository = name if "/" in name else f"library/{name}"

    def look() -> str:
        with Api("Docker Hub", REGISTRY_TOKENS) as tokens:
            query = {"service": "registry.docker.io", "scope": f"repository:{repository}:pull"}
            token = tokens.request("GET", "/token", query=query)["token"]
        with Api("Docker Hub", REGISTRY, {"Authorization": f"Bearer {token}", "Accept": MANIFESTS}) as registry:
            registry.request("GET", f"/v2/{repository}/manifests/{quote(tag)}")
        return image

    return _looked("image at Docker Hub", look)
