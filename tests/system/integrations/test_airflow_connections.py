"""`skyward_conn_id` and `provider_conn_id`: a task's ledger and credentials come from connections, read while it runs."""

import base64
import importlib.util
import json
import textwrap

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.system.integrations.test_airflow import HEAD, Airflow, airflow

__all__ = ["airflow"]

SECRET_KEY = base64.b64encode(b"k" * 32).decode()
WITH_CONNECTIONS = (
    HEAD
    + """
import json, os
from airflow_provider_skyward import connections, hooks
from airflow_provider_skyward.hooks import CloudHook

class LocalHook(CloudHook):
    conn_type, provider_class, secrets_by_part = "skyward_test", "Local", {}
    plain_by_extra = {"price": "price_per_hour"}

hooks.HOOKS["skyward_test"] = LocalHook

def has_connection(name, **fields):
    os.environ[f"AIRFLOW_CONN_{name.upper()}"] = json.dumps(fields)

def known(url, task):
    return len(sky.cost_of(sky.Work(system="airflow", task=task), ledger_url=url))
"""
)


@pytest.mark.parametrize("durable", [False, True])
def test_a_task_uses_the_ledger_and_the_credentials_of_its_connections(airflow: Airflow, durable: bool) -> None:
    """Its pool is in the connection's ledger and has the price of the connection's provider. The environment is as
    before afterwards. The names may be templates, and the file reads no connection.
    """
    name = f"connected_{durable}"
    url = f"sqlite:///{airflow.home / name}.sqlite"
    ran = airflow.run(
        name,
        f"""
        @dag(schedule=None, params={{"cloud": "our_cloud"}})
        def {name}():
            @task.skyward(skyward_conn_id="our_ledger", provider_conn_id="{{{{ params.cloud }}}}", provider="local",
                          durable={durable}, image=sky.Image(env={{"A": "b"}}))
            def {name}_task():
                return 1
            @task
            def check():
                here = {{key: os.environ.get(key) for key in ("SKYWARD_LEDGER", "SKYWARD_SECRET_KEY")}}
                return [known("{url}", "{name}_task"), known(None, "{name}_task"), here["SKYWARD_SECRET_KEY"]]
            {name}_task() >> check()
        {name}()
        has_connection("our_ledger", conn_type="skyward", password="{SECRET_KEY}", extra={{"ledger_url": "{url}"}})
        has_connection("our_cloud", conn_type="skyward_test", extra={{"price": 7.2}})
        """,
        head=WITH_CONNECTIONS,
    )
    assert ran.state == "success", ran.log
    assert ran.bill(f"{name}_task")["hourly_rate"] == pytest.approx(7.2) or durable
    assert ran.xcoms["check", -1, "return_value"][0] == 1
    assert ran.xcoms["check", -1, "return_value"][1:] == [0, None]


def test_connections_that_do_not_fit_say_so(airflow: Airflow) -> None:
    """A connection of no cloud, one of another cloud, several providers, and a triggerer with another ledger."""
    code = """
        import asyncio
        has_connection("web", conn_type="http")
        has_connection("pod", conn_type="skyward_runpod", password="secret")
        has_connection("one", conn_type="skyward", extra={"ledger_url": "sqlite:////tmp/none/a"})
        has_connection("two", conn_type="skyward", extra={"ledger_url": "sqlite:////tmp/none/b"})
        def error_of(of):
            try:
                of()
            except sky.BadRequest as error:
                return str(error)
        before = os.environ.pop("SKYWARD_LEDGER", None)
        answer = [
            error_of(lambda: connections.credentials_of("web", None)),
            error_of(lambda: connections.credentials_of("pod", sky.AWS(region="us-east-1"))),
            error_of(lambda: connections.credentials_of("pod", (sky.AWS(), sky.RunPod()))),
            error_of(lambda: asyncio.run(connections.ledger_of_triggerer("one"))),
            error_of(lambda: asyncio.run(connections.ledger_of_triggerer("one"))),
            error_of(lambda: asyncio.run(connections.ledger_of_triggerer("two"))),
        ]
        pod = asyncio.run(connections.credentials_in_triggerer("pod", {"name": "runpod", "region": "EU-RO-1"}))
        answer += [pod.region, pod.api_key.get_secret_value(), repr(pod)]
        os.environ.pop("SKYWARD_LEDGER")
        if before is not None:
            os.environ["SKYWARD_LEDGER"] = before
    """
    web, aws, several, first, same, other, region, key, shown = airflow.evaluate(
        WITH_CONNECTIONS.removeprefix(HEAD) + textwrap.dedent(code)
    )
    assert "has the type 'http'" in web
    assert "choose one cloud" in aws
    assert "for one provider" in several
    assert (first, same) == (None, None)
    assert "SKYWARD_LEDGER of the connection 'two' is not that of this triggerer" in other
    assert (region, key) == ("EU-RO-1", "secret")
    assert "secret" not in shown.replace("SecretStr", "")


def test_a_serialized_task_has_the_names_of_its_connections_only(airflow: Airflow) -> None:
    """No connection is read when the file is parsed: these do not exist."""
    code = """
        from airflow.serialization.serialized_objects import DagSerialization
        @dag(schedule=None)
        def d():
            task.skyward(provider=LOCAL, skyward_conn_id="none_such", provider_conn_id="none_either")(lambda: 1).override(task_id="a")()
            task.skyward(provider=LOCAL)(lambda: 1).override(task_id="b")()
        found = DagSerialization.to_dict(d())["dag"]["tasks"]
        answer = [one["__var"] for one in found]
    """
    both = airflow.evaluate(code)
    assert (both[0]["skyward_conn_id"], both[0]["provider_conn_id"]) == ("none_such", "none_either")
    assert "conn_id" not in json.dumps(both[1])


def test_the_trigger_carries_names_and_no_secret(airflow: Airflow) -> None:
    """It reads the connections when it ends a pool, of any ledger, also if the triggerer has another one."""
    code = """
        import asyncio
        from airflow_provider_skyward.triggers import SkywardTrigger
        has_connection("pod", conn_type="skyward_runpod", password="secret")
        has_connection("two", conn_type="skyward", extra={"ledger_url": "sqlite:////tmp/none/b"})
        plain = SkywardTrigger("sky-1", ["a"], [0])
        named = SkywardTrigger("sky-1", ["a"], [0], skyward_conn_id="two", provider_conn_id="pod",
                               provider={"name": "runpod", "region": "EU-RO-1"})
        answer = [one.serialize()[1] for one in (plain, named, SkywardTrigger(**named.serialize()[1]))]
        release, before = sky.release, dict(os.environ)
        sky.release = lambda pool, credentials, ledger_url: answer.append(
            [pool, ledger_url] + ([credentials.region, credentials.api_key.get_secret_value()] if credentials else []))
        asyncio.run(named.on_kill())
        asyncio.run(plain.on_kill())
        sky.release = release
        answer.append(before == dict(os.environ))
    """
    plain, named, again, ended, ended_plain, is_unchanged = airflow.evaluate(
        WITH_CONNECTIONS.removeprefix(HEAD) + textwrap.dedent(code)
    )
    assert set(plain) == {"pool_id", "call_ids", "cursors"}
    assert named == again
    assert (named["skyward_conn_id"], named["provider_conn_id"]) == ("two", "pod")
    assert "secret" not in json.dumps(named)
    assert ended == ["sky-1", "sqlite:////tmp/none/b", "EU-RO-1", "secret"]
    assert ended_plain == ["sky-1", None]
    assert is_unchanged
