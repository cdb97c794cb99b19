"""Blocks of Prefect: `SkywardPool`, a pool's settings as a form in the UI, and the credentials of each cloud.

Prefect's server and workers import this module, because it is registered under `prefect.collections`. It loads nothing
of the core but names; the rest is loaded when a pool is made.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from prefect.blocks.abstract import CredentialsBlock
from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, SecretStr

import skyward_core as sky

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCUMENTATION = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
"""Of blocks in general; the page of these is docs/prefect.md."""
CLOUDS = Literal["local", "aws", "digitalocean", "runpod", "vastai", "verda", "hosts"]


class SkywardCredentials(CredentialsBlock, ABC):  # Prefect registers no block that has ABC as a base itself
    """Credentials of a cloud. Each cloud has a block of this kind; this one has no form.

    `SkywardCredentials.load("skyward-aws-credentials/BLOCK_NAME")` loads that of any cloud: its type and its name.
    """

    _cloud: ClassVar[str] = ""

    def get_client(self, **options: Any) -> sky.Provider:
        """Return the cloud with these credentials; `options` are its other settings, such as `region`.

        Raises BadRequest for an option that the cloud has not.
        """
        kind = {
            "aws": lambda: sky.AWS,
            "digitalocean": lambda: sky.DigitalOcean,
            "runpod": lambda: sky.RunPod,
            "vastai": lambda: sky.VastAI,
            "verda": lambda: sky.Verda,
        }[self._cloud]()
        settings: dict[str, Any] = {**options, **self._secrets()}
        return kind(**settings)

    @property
    def cloud(self) -> str:
        """The name of the cloud, as in `provider` of a pool."""
        return self._cloud

    def _secrets(self) -> Mapping[str, SecretStr]:
        names = {name for name, field in type(self).model_fields.items() if field.exclude is not True}
        return {name: value for name in names if isinstance(value := getattr(self, name), SecretStr)}


class SkywardAWSCredentials(SkywardCredentials):
    """Credentials of AWS for pools of Skyward.

    Example:
        ```python
        from prefect_skyward.blocks import SkywardAWSCredentials

        credentials = SkywardAWSCredentials.load("BLOCK_NAME")
        aws = credentials.get_client(region="us-east-1")
        ```
    """

    _cloud: ClassVar[str] = "aws"
    _block_type_name = "Skyward AWS Credentials"
    _block_type_slug = "skyward-aws-credentials"
    _description = "Credentials of AWS for pools of Skyward."
    _documentation_url = DOCUMENTATION

    access_key_id: SecretStr = Field(description="The id of an access key.")
    secret_access_key: SecretStr = Field(description="The secret of the access key.")
    session_token: SecretStr | None = Field(default=None, description="The token of temporary credentials.")


class SkywardDigitalOceanCredentials(SkywardCredentials):
    """Credentials of DigitalOcean for pools of Skyward.

    Example:
        ```python
        from prefect_skyward.blocks import SkywardDigitalOceanCredentials

        credentials = SkywardDigitalOceanCredentials.load("BLOCK_NAME")
        cloud = credentials.get_client(region="nyc2")
        ```
    """

    _cloud: ClassVar[str] = "digitalocean"
    _block_type_name = "Skyward DigitalOcean Credentials"
    _block_type_slug = "skyward-digitalocean-credentials"
    _description = "Credentials of DigitalOcean for pools of Skyward."
    _documentation_url = DOCUMENTATION

    token: SecretStr = Field(description="A token that may create and delete droplets.")
    node_token: SecretStr | None = Field(
        default=None, description="A token that nodes get, which may do no more than delete their own droplet."
    )


class SkywardRunPodCredentials(SkywardCredentials):
    """Credentials of RunPod for pools of Skyward.

    Example:
        ```python
        from prefect_skyward.blocks import SkywardRunPodCredentials

        credentials = SkywardRunPodCredentials.load("BLOCK_NAME")
        cloud = credentials.get_client(cloud="secure")
        ```
    """

    _cloud: ClassVar[str] = "runpod"
    _block_type_name = "Skyward RunPod Credentials"
    _block_type_slug = "skyward-runpod-credentials"
    _description = "Credentials of RunPod for pools of Skyward."
    _documentation_url = DOCUMENTATION

    api_key: SecretStr = Field(description="An API key that may create and delete pods.")


class SkywardVastAICredentials(SkywardCredentials):
    """Credentials of Vast.ai for pools of Skyward.

    Example:
        ```python
        from prefect_skyward.blocks import SkywardVastAICredentials

        credentials = SkywardVastAICredentials.load("BLOCK_NAME")
        cloud = credentials.get_client(verified_only=True)
        ```
    """

    _cloud: ClassVar[str] = "vastai"
    _block_type_name = "Skyward Vast.ai Credentials"
    _block_type_slug = "skyward-vastai-credentials"
    _description = "Credentials of Vast.ai for pools of Skyward."
    _documentation_url = DOCUMENTATION

    api_key: SecretStr = Field(description="An API key that may create and delete instances.")


class SkywardVerdaCredentials(SkywardCredentials):
    """Credentials of Verda for pools of Skyward.

    Example:
        ```python
        from prefect_skyward.blocks import SkywardVerdaCredentials

        credentials = SkywardVerdaCredentials.load("BLOCK_NAME")
        cloud = credentials.get_client(region="FIN-01")
        ```
    """

    _cloud: ClassVar[str] = "verda"
    _block_type_name = "Skyward Verda Credentials"
    _block_type_slug = "skyward-verda-credentials"
    _description = "Credentials of Verda for pools of Skyward."
    _documentation_url = DOCUMENTATION

    client_id: SecretStr = Field(description="The id of an API client.")
    client_secret: SecretStr = Field(description="The secret of the API client.")
    node_client_id: SecretStr | None = Field(
        default=None, description="The id of the API client that nodes get, to end themselves."
    )
    node_client_secret: SecretStr | None = Field(default=None, description="The secret of the nodes' API client.")


class SkywardPool(Block):
    """The settings of a pool, for `SkywardTaskRunner.from_block`.

    Fields that are left empty are the defaults of a pool, or come from the settings of the machine that runs the flow.

    Example:
        ```python
        from prefect_skyward.blocks import SkywardPool

        pool = SkywardPool.load("BLOCK_NAME")
        print(pool.get_pool().quote())
        ```
    """

    _block_type_name = "Skyward Pool"
    _block_type_slug = "skyward-pool"
    _description = "The settings of a pool of accelerators: hardware, environment, limits of time and money."
    _documentation_url = DOCUMENTATION

    provider: CLOUDS | None = Field(
        default=None, description="Who rents the machines; empty: as the settings of the flow's machine say."
    )
    credentials: (
        SkywardAWSCredentials
        | SkywardDigitalOceanCredentials
        | SkywardRunPodCredentials
        | SkywardVastAICredentials
        | SkywardVerdaCredentials
        | None
    ) = Field(default=None, description="Credentials of the cloud; empty: those of the flow's machine.")
    provider_options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Other settings of the cloud, such as its region."
    )
    accelerator: str | None = Field(
        default=None, description='The accelerators of one machine, as "A100" or "4 x H100"; empty: none.'
    )
    nodes: int = Field(default=1, ge=1, description="Number of machines.")
    most_nodes: int | None = Field(
        default=None, ge=1, description="Number of machines up to which the pool grows; empty: it does not grow."
    )
    machine: str | None = Field(default=None, description="Instance type, in the cloud's own words.")
    cpu: int | None = Field(default=None, ge=1, description="CPU cores of one machine, at least.")
    memory: str | None = Field(default=None, description='Memory of one machine, at least, as "32GB".')
    spot: Literal["always", "if-available", "never"] | None = Field(
        default=None, description="Whether machines are spot machines; empty: where they are sold."
    )
    pip: list[str] = Field(default_factory=list[str], description="Python packages on the nodes.")
    apt: list[str] = Field(default_factory=list[str], description="Debian packages on the nodes.")
    env: dict[str, str] = Field(
        default_factory=dict[str, str], description="Environment variables of the calls, as plain text."
    )
    secrets: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Environment variables of the calls, each with the name of the Secret block that has its value.",
    )
    max_cost: float | None = Field(default=None, gt=0, description="Hard limit of the flow run's cost, in USD.")
    max_hourly_cost: float | None = Field(
        default=None,
        gt=0,
        description="The most that all machines of the pool together may cost, in USD per hour.",
    )
    budget: str | None = Field(default=None, description="Account of the ledger that pays.")
    max_lifetime: float | None = Field(default=None, gt=0, description="Hard limit of the pool's life, in seconds.")
    name: str | None = Field(
        default=None, description="Flow runs whose pools have the same name share the machines; empty: none are shared."
    )
    keep_warm: float = Field(
        default=0.0, ge=0, description="Seconds for which a pool with a name stays when no flow run uses it."
    )
    more: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Other keywords of a pool, such as concurrency or retries."
    )

    def get_spec(self) -> sky.PoolSpec:
        """Return the spec of the pool; its provider has the secrets of `credentials`, in memory only.

        Raises BadRequest for settings that cannot be, with the field's name.
        """
        fields: dict[str, Any] = {
            name: value
            for name in (
                *("accelerator", "machine", "cpu", "memory", "spot"),
                *("max_cost", "max_hourly_cost", "budget", "max_lifetime"),
            )
            if (value := getattr(self, name)) is not None
        }
        if (provider := self.get_provider()) is not None:
            fields["provider"] = provider
        if self.pip or self.apt:
            fields["image"] = sky.Image(pip=tuple(self.pip), apt=tuple(self.apt))
        if self.env:
            fields["env"] = self.env
        if self.secrets:
            fields["secrets"] = {name: sky.Secret.from_store(block) for name, block in self.secrets.items()}
        if self.name is not None:
            fields["name"] = self.name
        if self.keep_warm:
            fields["keep_warm"] = self.keep_warm
        if "provider" in self.more:
            _refuse_credentials(self.more["provider"])
        nodes = self.nodes if self.most_nodes is None else (self.nodes, self.most_nodes)
        settings: dict[str, Any] = {**fields, "nodes": nodes, **self.more}
        return sky.PoolSpec.of(**settings)

    def get_provider(self) -> sky.Provider | None:
        """Return the cloud, with the credentials; None if the block names none.

        Raises BadRequest if the credentials are those of another cloud.
        """
        if (cloud := self.provider if self.credentials is None else self.credentials.cloud) is not None:
            _refuse_credentials({"name": cloud, **self.provider_options})
        if self.credentials is not None:
            if self.provider not in {None, self.credentials.cloud}:
                raise sky.BadRequest(
                    f"provider={self.provider!r} and credentials of {self.credentials.cloud}: choose one cloud"
                )
            return self.credentials.get_client(**self.provider_options)
        if self.provider is None:
            return None
        return sky.PoolSpec.of(provider={"name": self.provider, **self.provider_options}).providers[0]

    def get_pool(self, *, on_event: sky.Callback | None = None) -> sky.ComputePool:
        """Return a pool that is not open yet, for `with`."""
        from prefect_skyward.secrets import values_of

        spec = self.get_spec()
        return sky.ComputePool.from_spec(spec, on_event=on_event, secrets=values_of(spec))


def _refuse_credentials(provider: Any) -> None:
    """Raise BadRequest for credentials among plain options: Prefect stores and shows them as they are."""
    sky.PoolSpec.of(provider=provider).refuse_written_credentials(
        "the options of a block, which Prefect stores as plain text",
        "write credentials=Skyward{kind}Credentials({field}=...), a block whose values Prefect encrypts",
    )


def load_pool(name: str) -> SkywardPool:
    """Return a saved block. Raises BadRequest if there is none of this name."""
    try:
        return cast("SkywardPool", cast(Any, SkywardPool).load(name, _sync=True))
    except ValueError as error:
        raise sky.BadRequest(
            f"there is no SkywardPool block {name!r}: make it in Prefect's UI after `prefect block register -m"
            f" prefect_skyward`, or with SkywardPool(...).save({name!r})"
        ) from error
