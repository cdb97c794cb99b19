"""The forms of our connection types, as data for the provider info. This file imports nothing: see `__init__`."""

from __future__ import annotations

_HOOKS = "airflow_provider_skyward.hooks"
_PLACEHOLDERS = {
    "Secret key": "the same for all workers; `openssl rand -base64 32` prints one",
    "Access key id": "AKIA...; empty: the worker's own credentials",
    "Secret access key": "empty: the worker's own credentials",
    "API key": "made in the console of the cloud",
    "Token": "made in the console of the cloud; it may read and write",
    "Client id": "made in the console of the cloud",
    "Client secret": "shown once, beside the client id",
}
_UNUSED = ("host", "port", "schema", "login", "extra")
_REGION = {"label": "Region", "description": "one region, or several with commas; empty: the provider's default"}


def connection_types() -> list[dict[str, object]]:
    """Return the connection types: one for the ledger, one for each cloud."""
    key, token = {"password": "API key"}, {"password": "Token"}
    cloud: dict[str, object] = {
        "label": "Cloud",
        "description": "empty: both",
        "schema": _text(enum=["secure", "community"]),
    }
    return [
        _type("skyward", "SkywardHook", "Skyward", {"password": "Secret key"}, {"ledger_url": _LEDGER_URL}),
        _type(
            "skyward_aws",
            "AWSHook",
            "Skyward: AWS",
            {"login": "Access key id", "password": "Secret access key"},
            {"region": _field(_REGION), "profile": _PROFILE, "session_token": _SESSION_TOKEN},
        ),
        _type("skyward_runpod", "RunPodHook", "Skyward: RunPod", key, {"region": _field(_REGION), "cloud": cloud}),
        _type("skyward_vastai", "VastAIHook", "Skyward: Vast.ai", key, {"region": _field(_REGION)}),
        _type(
            "skyward_verda",
            "VerdaHook",
            "Skyward: Verda",
            {"login": "Client id", "password": "Client secret"},
            {"region": _field(_REGION)},
        ),
        _type("skyward_digitalocean", "DigitalOceanHook", "Skyward: DigitalOcean", token, {"region": _field(_REGION)}),
    ]


def _type(
    name: str, hook: str, shown: str, relabelled: dict[str, str], fields: dict[str, dict[str, object]]
) -> dict[str, object]:
    return {
        "connection-type": name,
        "hook-class-name": f"{_HOOKS}.{hook}",
        "hook-name": shown,
        "ui-field-behaviour": {
            "hidden-fields": [field for field in _UNUSED if field not in relabelled],
            "relabeling": relabelled,
            "placeholders": {field: _PLACEHOLDERS[label] for field, label in relabelled.items()},
        },
        "conn-fields": fields,
    }


def _field(about: dict[str, str], **schema: object) -> dict[str, object]:
    return {**about, "schema": _text(**schema)}


def _text(**schema: object) -> dict[str, object]:
    return {"type": ["string", "null"], **schema}


_LEDGER_URL = _field(
    {"label": "Ledger URL", "description": "the database of costs and machines, as in SKYWARD_LEDGER"},
    format="password",
)
_PROFILE = _field({"label": "Profile", "description": "a profile of the worker's AWS configuration"})
_SESSION_TOKEN = _field({"label": "Session token", "description": "of temporary credentials"}, format="password")
