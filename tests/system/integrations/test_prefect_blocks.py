"""Blocks of Prefect: the settings of a pool as a form, and the credentials of each cloud."""

import json
import os
import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import asked, database_text  # isort: skip

from prefect import flow, task  # isort: skip
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, blocks

BLOCKS = [
    blocks.SkywardPool,
    blocks.SkywardAWSCredentials,
    blocks.SkywardDigitalOceanCredentials,
    blocks.SkywardRunPodCredentials,
    blocks.SkywardVastAICredentials,
    blocks.SkywardVerdaCredentials,
]
SECRET = "s3cr3t-0123456789"


@pytest.mark.parametrize("block", BLOCKS)
class TestStandardSuite(BlockStandardTestSuite):
    """Prefect's own suite for blocks. There is no logo, because the project has no address for one."""

    @pytest.fixture
    def block(self, block: type[Block]) -> type[Block]:
        return block

    test_has_a_valid_image = None


@pytest.mark.parametrize("kind", BLOCKS[1:])
def test_credentials_become_the_provider_and_are_shown_nowhere(kind: Any) -> None:
    """Every field is the provider's own, and a secret; repr and JSON of the provider have none."""
    credentials = kind(**dict.fromkeys(kind.model_fields, SECRET))
    provider = credentials.get_client()
    assert provider.name == credentials.cloud
    for name in kind.model_fields:
        assert getattr(provider, name).get_secret_value() == SECRET
    spec = blocks.SkywardPool(credentials=credentials).get_spec()
    assert spec.providers == (provider,)
    assert SECRET not in repr(credentials) + repr(provider) + spec.model_dump_json() + repr(spec)


def test_a_pool_s_fields_become_its_spec() -> None:
    block = blocks.SkywardPool(
        provider="local",
        provider_options={"price_per_hour": 1.5},
        accelerator="2 x A100",
        nodes=1,
        most_nodes=4,
        pip=["numpy"],
        env={"A": "b"},
        secrets={"HF_TOKEN": "hf-token"},
        max_cost=5,
        spot="never",
        name="team-gpu",
        keep_warm=60,
        more={"concurrency": 2},
    )
    assert block.get_spec() == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=1.5),
        accelerator="2 x A100",
        nodes=(1, 4),
        image=sky.Image(pip=("numpy",)),
        env={"A": "b"},
        secrets={"HF_TOKEN": sky.Secret.from_store("hf-token")},
        max_cost=5,
        spot="never",
        name="team-gpu",
        keep_warm=60,
        concurrency=2,
    )
    assert blocks.SkywardPool().get_spec() == sky.PoolSpec.of()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"more": {"node": 2}}, "did you mean 'nodes'"),
        ({"accelerator": "A1000"}, "A1000"),
        ({"provider": "aws", "credentials": blocks.SkywardRunPodCredentials(api_key=SECRET)}, "choose one cloud"),
        ({"provider": "aws", "provider_options": {"regoin": "x"}}, "region"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_field_s_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(sky.BadRequest, match=message):
        blocks.SkywardPool(**fields).get_spec()


api = pytest.fixture(scope="module")(prefect_server.served)


@task
def double(x: int) -> int:
    return 2 * x


@pytest.mark.filterwarnings("default")
def test_a_runner_is_made_from_a_saved_block_and_its_pickle_names_the_block_only(
    api: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The block is registered with its form, the flow runs on its pool, and no secret is in the database's plain text
    or in the pickle of the flow.
    """
    command = [sys.executable, "-m", "prefect", "block", "register", "-m", "prefect_skyward"]
    environ = {**os.environ, "PREFECT_API_URL": api}
    registered = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert "Successfully registered 6 blocks" in registered
    types = {one["slug"]: one for one in asked("/block_types/filter", {})}
    schemas = asked(
        "/block_schemas/filter",
        {"block_schemas": {"block_type_id": {"any_": [types["skyward-pool"]["id"]]}}},
    )
    form = schemas[0]["fields"]["properties"]
    assert set(form) == set(blocks.SkywardPool.model_fields)
    assert form["accelerator"]["description"].startswith("The accelerators of one machine")
    credentials = blocks.SkywardAWSCredentials(access_key_id="AKIA-of-test", secret_access_key=SECRET)
    credentials.save("team", overwrite=True)
    blocks.SkywardPool(credentials=credentials, accelerator="A100").save("cloud", overwrite=True)
    blocks.SkywardPool(provider="local", provider_options={"price_per_hour": 1.0}, nodes=2).save("gpu", overwrite=True)

    rented = SkywardTaskRunner.from_block("cloud")
    assert rented.spec.providers[0].secret_access_key.get_secret_value() == SECRET
    texts = [cloudpickle.dumps(rented), pickle.dumps(rented.duplicate()), rented.spec.model_dump_json().encode()]
    assert not any(SECRET.encode() in text for text in texts)
    assert pickle.loads(texts[0]).spec.providers[0].secret_access_key.get_secret_value() == SECRET
    assert SECRET not in database_text(tmp_path_factory)

    @flow(task_runner=SkywardTaskRunner.from_block("gpu"))
    def doubled() -> list[int]:
        return double.map([1, 2, 3]).result()

    assert doubled() == [2, 4, 6]
    with pytest.raises(sky.BadRequest, match="there is no SkywardPool block 'no-such'"):
        SkywardTaskRunner.from_block("no-such")
    assert json.loads(json.dumps(form))["nodes"]["default"] == 1
