"""Hooks: credentials of clouds, the ledger's URL and the secret key, from Airflow's connections.

A connection may come from any secrets backend. It is read while a task runs, or for a test of the connection, and its
secrets are masked in logs.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

import skyward_core as sky


class SkywardHook(BaseHook):
    """The connection type `skyward`: `extra.ledger_url` is the URL of the ledger, the password is the secret key."""

    conn_name_attr = "skyward_conn_id"
    default_conn_name = "skyward_default"
    conn_type = "skyward"
    hook_name = "Skyward"

    def __init__(self, skyward_conn_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.skyward_conn_id = skyward_conn_id or self.default_conn_name

    def get_conn(self) -> dict[str, str]:
        """Return the environment variables that this connection stands for: `SKYWARD_LEDGER`, `SKYWARD_SECRET_KEY`."""
        return self.variables_of(self.get_connection(self.skyward_conn_id))

    @staticmethod
    def variables_of(connection: Any) -> dict[str, str]:
        """Return the environment variables that a connection of this type stands for.

        Raises BadRequest for a secret key that no pool takes.
        """
        if connection.password:
            sky.check_secret_key(connection.password)
        found = {
            "SKYWARD_LEDGER": connection.extra_dejson.get("ledger_url"),
            "SKYWARD_SECRET_KEY": connection.password,
        }
        return {name: _masked(value) for name, value in found.items() if value}

    def test_connection(self) -> tuple[bool, str]:
        """Check the secret key, and read from the ledger. It costs nothing."""
        try:
            url = self.get_conn().get("SKYWARD_LEDGER")
            sky.cost_of(sky.Work(system="airflow", workflow="test of the connection", run="none"), ledger_url=url)
        except Exception as error:
            return False, _described(error)
        return True, "the ledger answers"


class CloudHook(BaseHook):
    """Base of the hooks for clouds: `get_conn` returns the provider, for `provider=` of a pool."""

    conn_name_attr = "skyward_conn_id"
    default_conn_name: ClassVar[str]
    provider_class: ClassVar[str]
    """The name of the provider's class in `skyward_core`."""
    secrets_by_part: ClassVar[dict[str, str]] = {}
    """The fields of the provider that parts of the connection (`login`, `password`, `extra.NAME`) hold."""
    plain_by_extra: ClassVar[dict[str, str]] = {"region": "region"}
    """The fields of the provider that names of `extra` hold."""

    def __init__(self, skyward_conn_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.skyward_conn_id = skyward_conn_id or self.default_conn_name

    def get_conn(self) -> sky.Provider:
        """Return the provider with the credentials of the connection. Raises BadRequest for values it refuses.

        A field that the connection leaves empty is left to the provider: it looks in the worker's environment.
        """
        return self.provider_for(self.get_connection(self.skyward_conn_id))

    def provider_for(self, connection: Any, given: sky.Provider | None = None) -> sky.Provider:
        """Return the provider with the credentials of a connection; the fields that `given` sets go before its own.

        Raises BadRequest for values that it refuses, and for a given provider of another cloud.
        """
        kind = getattr(sky, self.provider_class)
        if given is not None and given.name != kind.name:
            raise sky.BadRequest(
                f"provider={given.name!r} and the connection {self.skyward_conn_id!r} of {kind.name}: choose one cloud"
            )
        settings = {} if given is None else {name: value for name, value in given.to_json().items() if name != "name"}
        return kind(**(self.fields_of(connection) | settings))

    def fields_of(self, connection: Any) -> dict[str, Any]:
        """Return the fields of the provider that a connection has; its secrets are masked in logs from now on."""
        secrets = {field: _part_of(connection, part) for part, field in self.secrets_by_part.items()}
        plain = {field: connection.extra_dejson.get(name) for name, field in self.plain_by_extra.items()}
        fields: dict[str, Any] = {name: _masked(value) for name, value in secrets.items() if value}
        return fields | {name: _regions(value) if name == "region" else value for name, value in plain.items() if value}

    def test_connection(self) -> tuple[bool, str]:
        """Query the account that the credentials belong to. It rents nothing and costs nothing."""
        try:
            account = self.get_conn().account()
        except Exception as error:
            return False, _described(error)
        return True, f"the credentials are valid for the account {account}" if account else "the provider answers"


class AWSHook(CloudHook):
    """The connection type `skyward_aws`; a connection of the type `aws`, such as `aws_default`, works too."""

    default_conn_name = "skyward_aws_default"
    conn_type = "skyward_aws"
    hook_name = "Skyward: AWS"
    provider_class = "AWS"
    secrets_by_part: ClassVar[dict[str, str]] = {
        "login": "access_key_id",
        "password": "secret_access_key",
        "extra.session_token": "session_token",
    }
    plain_by_extra: ClassVar[dict[str, str]] = {"region": "region", "profile": "profile"}

    def fields_of(self, connection: Any) -> dict[str, Any]:
        """Return the fields of the provider. With the Amazon provider installed, its hook resolves connections of the
        type `aws`: roles, profiles and web identities.
        """
        if connection.conn_type != "aws":
            return super().fields_of(connection)
        keys = _keys_by_amazon(self.skyward_conn_id) if _has_amazon() else _keys_in(connection)
        region = connection.extra_dejson.get("region_name")
        fields: dict[str, Any] = {name: _masked(value) for name, value in keys.items() if value}
        return fields | ({"region": region} if region else {})


class RunPodHook(CloudHook):
    """The connection type `skyward_runpod`: the password is the API key."""

    default_conn_name = "skyward_runpod_default"
    conn_type = "skyward_runpod"
    hook_name = "Skyward: RunPod"
    provider_class = "RunPod"
    secrets_by_part: ClassVar[dict[str, str]] = {"password": "api_key"}
    plain_by_extra: ClassVar[dict[str, str]] = {"region": "region", "cloud": "cloud"}


class VastAIHook(CloudHook):
    """The connection type `skyward_vastai`: the password is the API key."""

    default_conn_name = "skyward_vastai_default"
    conn_type = "skyward_vastai"
    hook_name = "Skyward: Vast.ai"
    provider_class = "VastAI"
    secrets_by_part: ClassVar[dict[str, str]] = {"password": "api_key"}


class VerdaHook(CloudHook):
    """The connection type `skyward_verda`: the login is the client id, the password the client secret."""

    default_conn_name = "skyward_verda_default"
    conn_type = "skyward_verda"
    hook_name = "Skyward: Verda"
    provider_class = "Verda"
    secrets_by_part: ClassVar[dict[str, str]] = {"login": "client_id", "password": "client_secret"}


class DigitalOceanHook(CloudHook):
    """The connection type `skyward_digitalocean`: the password is the token."""

    default_conn_name = "skyward_digitalocean_default"
    conn_type = "skyward_digitalocean"
    hook_name = "Skyward: DigitalOcean"
    provider_class = "DigitalOcean"
    secrets_by_part: ClassVar[dict[str, str]] = {"password": "token"}


HOOKS: dict[str, type[CloudHook]] = {
    **{hook.conn_type: hook for hook in (AWSHook, RunPodHook, VastAIHook, VerdaHook, DigitalOceanHook)},
    "aws": AWSHook,
}
"""The hooks of clouds, by the types of their connections."""


def provider_of(conn_id: str, connection: Any, given: sky.Provider | None = None) -> sky.Provider:
    """Return the provider of a connection of any cloud. Raises BadRequest if its type is that of no cloud."""
    if connection.conn_type not in HOOKS:
        raise sky.BadRequest(
            f"the connection {conn_id!r} has the type {connection.conn_type!r}, and credentials of a cloud have one of"
            f" {', '.join(HOOKS)}"
        )
    return HOOKS[connection.conn_type](conn_id).provider_for(connection, given)


def _has_amazon() -> bool:
    try:
        return importlib.util.find_spec("airflow.providers.amazon") is not None
    except ModuleNotFoundError:
        return False


def _keys_by_amazon(conn_id: str) -> dict[str, str | None]:
    base_aws = importlib.import_module("airflow.providers.amazon.aws.hooks.base_aws")
    keys = base_aws.AwsBaseHook(aws_conn_id=conn_id, client_type="sts").get_credentials()
    return {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "session_token": keys.token}


def _keys_in(connection: Any) -> dict[str, str | None]:
    token = connection.extra_dejson.get("aws_session_token")
    return {"access_key_id": connection.login, "secret_access_key": connection.password, "session_token": token}


def _part_of(connection: Any, part: str) -> str | None:
    if part.startswith("extra."):
        return connection.extra_dejson.get(part.removeprefix("extra."))
    return getattr(connection, part)


def _regions(value: str) -> str | tuple[str, ...]:
    """Return one region, or several that commas separate."""
    regions = tuple(region.strip() for region in value.split(",") if region.strip())
    return regions if len(regions) > 1 else value.strip()


def _masked(value: str) -> str:
    mask_secret(value)
    return value


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
