"""AWS's SDK itself: moto as EC2, SSM and STS, and a server whose refusals the SDK repeats or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

import skyward_core as sky
from skyward_core.cli import main
from skyward_core.errors import CredentialsError, ProviderFailed
from skyward_core.providers.aws_account import AwsAccount
from skyward_core.providers.base import EXPIRES_TAG, IMAGE_TAG
from tests.providers.aws import OFFER, as_us
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import FakeAWS
from tests.providers.http_fake import FakeCloud, Reply, Request, route


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        as_us("http://{}:{}".format(*server.get_host_and_port()), monkeypatch)
        yield
    finally:
        server.stop()


def test_machines_of_moto_are_launched_listed_and_terminated(moto: None) -> None:
    """moto has no price list, and no parameters of Ubuntu's images."""
    provider = sky.AWS(ssh_cidr="203.0.113.0/24", ami="ami-12c6146b")
    assert provider.account() == "123456789012"
    launched = provider.launch(OFFER, 2, tags(first_rank=3), STARTUP)
    assert [machine.rank for machine in launched] == [3, 4]
    assert all(machine.endpoint is not None and machine.endpoint.host == machine.ip for machine in launched)
    assert {machine.id: machine.tags for machine in provider.instances(POOL)} == {
        machine.id: machine.tags for machine in launched
    }
    provider.terminate([launched[0].id])
    assert [machine.id for machine in provider.instances()] == [launched[1].id]
    provider.terminate([launched[1].id])
    assert provider.instances() == []


class FakeEc2(FakeCloud):
    """An EC2 that answers nothing but `reply`."""

    reply = Reply(200, "<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>", is_text=True)

    @route("POST", "/")
    def answer(self, _: Request) -> Reply:
        return self.reply


def refusal(status: int, code: str) -> Reply:
    return Reply(status, f"<Response><Errors><Error><Code>{code}</Code></Error></Errors></Response>", is_text=True)


@pytest.mark.parametrize("fault", [refusal(503, "RequestLimitExceeded"), refusal(500, "InternalError"), None])
def test_the_sdk_repeats_a_listing(monkeypatch: pytest.MonkeyPatch, fault: Reply | None) -> None:
    """After a refusal, an outage and a lost connection."""
    with FakeEc2() as cloud:
        as_us(cloud.url, monkeypatch)
        cloud.fail("POST", "/", fault)
        assert sky.AWS().instances(POOL) == []
        assert len(cloud.requests) == 2
        cloud.reply = Reply(502, "<html>502 Bad Gateway", is_text=True)  # a page of a proxy
        with pytest.raises(ProviderFailed):
            sky.AWS().instances(POOL)


def test_the_sdk_does_not_repeat_a_creating_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No capacity is a 500, which the SDK would repeat for seconds. Signing needs credentials."""
    with FakeEc2() as cloud:
        as_us(cloud.url, monkeypatch)
        cloud.reply = refusal(500, "InsufficientInstanceCapacity")
        with AwsAccount(None, None, None) as account, pytest.raises(sky.NoCapacity):
            account.ask("us-east-1", "ec2", "run_instances", once=True, MinCount=1, MaxCount=1)
        assert len(cloud.requests) == 1
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        with pytest.raises(CredentialsError, match="AWS_ACCESS_KEY_ID"):
            sky.AWS().instances(POOL)


def test_the_sweep_command_lists_what_it_would_delete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is text or JSON, with exit code 3 if there is something to delete. With --yes the command deletes."""
    parameters = ["--ledger", f"sqlite:///{tmp_path / 'ledger.db'}", "sweep", "--provider", '{"name": "aws"}']
    with FakeAWS() as cloud:
        as_us(cloud.url, monkeypatch)
        image = cloud.images.add({IMAGE_TAG: "0123456789ab", EXPIRES_TAG: "1"})
        why = "100 GiB with the packages of 0123456789ab: it has not been used for too long"
        line = f"aws: image {image.id} in us-east-1, {why}"
        assert main(parameters) == 3
        nothing = "nothing was touched; `skyward sweep --yes` does it"
        assert capsys.readouterr().out == f"to be taken away: {line}\n{nothing}\n"
        assert main([*parameters, "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["pruned"] == [line]
        assert main([*parameters, "--yes"]) == 0
        assert capsys.readouterr().out == f"taken away: {line}\n1 thing of no use taken away\n"
        assert main(parameters) == 0
        assert capsys.readouterr().out == "nothing is to be done\n"


def test_a_region_that_does_not_answer_and_is_in_no_list_is_named() -> None:
    """Only then: it may be newer than the SDK."""
    assert said_of("us-esat-1").endswith("\"; the SDK lists no region 'us-esat-1' (near it: us-east-1, us-west-1)")
    assert said_of("moon-base-1").endswith("; the SDK lists no region 'moon-base-1'")
    assert said_of("eu-west-1").endswith('Could not connect to the endpoint URL: "http://127.0.0.1:1/"')


def said_of(region: str) -> str:
    with AwsAccount(None, "http://127.0.0.1:1", ("id", "secret", None)) as account:
        try:
            account.ask(region, "ec2", "describe_instances", once=True)
        except ProviderFailed as error:
            return str(error)
    raise AssertionError(region)
