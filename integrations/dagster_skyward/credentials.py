"""Credentials of each cloud as resources, for `SkywardResource(credentials=...)`.

Their fields come from the environment: `dg.EnvVar("NAME")`. Dagster stores and shows the name. The values are only in
the memory of the process that opens the pool, in no spec, ledger or machine.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Optional

import dagster as dg
from pydantic import Field

import skyward_core as sky


class SkywardCredentials(dg.ConfigurableResource):  # pyright: ignore[reportMissingTypeArgument]
    """What the credentials of all clouds share. Each cloud has a subclass."""

    cloud: ClassVar[str] = ""
    provider_class: ClassVar[Callable[[], type[sky.Provider]]]

    def provider(self, given: sky.Provider | None) -> sky.Provider:
        """Return the provider with these credentials, and the other settings of the given one.

        Raises BadRequest if that is of another cloud.
        """
        if given is not None and given.name != self.cloud:
            raise sky.BadRequest(f"provider={given.name!r} and credentials of {self.cloud}: choose one cloud")
        settings: dict[str, Any] = {} if given is None else {**given.to_json()}
        settings.pop("name", None)
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return self.provider_class()(**settings, **{name: value for name, value in values.items() if value is not None})


class AWSCredentials(SkywardCredentials):
    """Credentials of AWS for pools."""

    cloud: ClassVar[str] = "aws"
    provider_class: ClassVar[Callable[[], type[sky.Provider]]] = staticmethod(lambda: sky.AWS)
    access_key_id: str = Field(description="The id of an access key.")
    secret_access_key: str = Field(description="The secret of the access key.")
    session_token: Optional[str] = Field(default=None, description="The token of temporary credentials.")  # noqa: UP045


class DigitalOceanCredentials(SkywardCredentials):
    """Credentials of DigitalOcean for pools."""

    cloud: ClassVar[str] = "digitalocean"
    provider_class: ClassVar[Callable[[], type[sky.Provider]]] = staticmethod(lambda: sky.DigitalOcean)
    token: str = Field(description="A token that may create and delete droplets.")
    node_token: Optional[str] = Field(  # noqa: UP045
        default=None, description="A token that nodes get, which may do no more than delete their own droplet."
    )


class RunPodCredentials(SkywardCredentials):
    """Credentials of RunPod for pools."""

    cloud: ClassVar[str] = "runpod"
    provider_class: ClassVar[Callable[[], type[sky.Provider]]] = staticmethod(lambda: sky.RunPod)
    api_key: str = Field(description="An API key that may create and delete pods.")


class VastAICredentials(SkywardCredentials):
    """Credentials of Vast.ai for pools."""

    cloud: ClassVar[str] = "vastai"
    provider_class: ClassVar[Callable[[], type[sky.Provider]]] = staticmethod(lambda: sky.VastAI)
    api_key: str = Field(description="An API key that may create and delete instances.")


class VerdaCredentials(SkywardCredentials):
    """Credentials of Verda for pools."""

    cloud: ClassVar[str] = "verda"
    provider_class: ClassVar[Callable[[], type[sky.Provider]]] = staticmethod(lambda: sky.Verda)
    client_id: str = Field(description="The id of an API client.")
    client_secret: str = Field(description="The secret of the API client.")
    node_client_id: Optional[str] = Field(  # noqa: UP045
        default=None, description="The id of the API client that nodes get, to end themselves."
    )
    node_client_secret: Optional[str] = Field(default=None, description="The secret of the nodes' API client.")  # noqa: UP045
