"""The JSON schema of `skyward.toml`: it accepts what the reader accepts, and shows editors each field."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import skyward_core as sky
from skyward_core.config.schema import settings_schema
from skyward_core.providers.base import BUILT_IN


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return settings_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_schema_has_each_field_of_a_pool(schema: dict[str, Any]) -> None:
    """With the description and the default of `PoolSpec`, at the top, in profiles and in pools."""
    fields = sky.PoolSpec.model_fields
    assert schema["properties"].keys() == {*fields, "profiles", "pools"}
    assert schema["properties"]["profiles"]["additionalProperties"]["properties"].keys() == fields.keys()
    assert schema["properties"]["pools"]["additionalProperties"]["properties"].keys() == fields.keys() - {"name"}
    for name, field in fields.items():
        assert schema["properties"][name]["description"] == field.description
    assert schema["properties"]["lease_seconds"]["default"] == 120


def test_the_schema_has_the_fields_of_each_provider(schema: dict[str, Any]) -> None:
    tables = [one for one in schema["$defs"].values() if "const" in one.get("properties", {}).get("name", {})]
    assert {one["properties"]["name"]["const"] for one in tables} == {*BUILT_IN}
    (local,) = [one for one in tables if one["properties"]["name"]["const"] == "local"]
    assert "price_per_hour" in local["properties"]


ACCEPTED = [
    "",
    "nodes = [1, 8]",
    "nodes = 2",
    "provider = 'local'",
    "provider = ['aws', {name = 'local', price_per_hour = 1.2}]",
    "accelerator = '4xA100'",
    "accelerator = {name = 'A100', count = 2}",
    "spot = 0.8",
    "spot = 'always'",
    "spot = {kind = 'always', retries = 2}",
    "spot = {kind = 'never'}",
    "secrets = ['HF_TOKEN']",
    "secrets = 'HF_TOKEN'",
    "secrets = {HF_TOKEN = {source = 'env', key = 'OTHER'}}",
    "env = {A = 'b'}",
    "image = {pip = ['numpy'], env = {A = '1'}}",
    "volume = [{mount_path = '/data', bucket = 'weather'}]",
    "[profiles.a]\nnodes = 3\n[pools.b]\nkeep_warm = 60",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_the_reader_accepts_the_schema_accepts(validator: Draft202012Validator, text: str, tmp_path: Path) -> None:
    found = tomllib.loads(text)
    assert list(validator.iter_errors(found)) == []
    (tmp_path / "skyward.toml").write_text(text)
    sky.PoolSpec.of(**sky.Settings.read({}, tmp_path).fields)


@pytest.mark.parametrize(
    "text",
    [
        "node = 2",
        "nodes = 'many'",
        "provider = {name = 'local', price = 3}",
        "provider = {price_per_hour = 3}",
        "image = {pips = ['numpy']}",
        "spot = {kind = 'sometimes'}",
        "display = 'loud'",
        "lease_seconds = 1",
        "[pools.a]\nname = 'b'",
        "[profiles.a]\nnode = 2",
    ],
)
def test_what_the_schema_refuses_the_reader_refuses(validator: Draft202012Validator, text: str, tmp_path: Path) -> None:
    assert list(validator.iter_errors(tomllib.loads(text)))
    (tmp_path / "skyward.toml").write_text(text)
    with pytest.raises(sky.BadRequest):
        sky.PoolSpec.of(**sky.Settings.read({}, tmp_path).fields)
