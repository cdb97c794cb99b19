"""Connections, hooks and the retry policy of the Airflow provider, in one separate process with its own Airflow home."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

SECRET = "secret-of-a-connection"
CONNECTIONS = {
    "skyward_default": {
        "conn_type": "skyward",
        "password": SECRET,
        "extra": {"ledger_url": "sqlite:///{home}/ledger.sqlite"},
    },
    "no_ledger": {"conn_type": "skyward", "extra": {"ledger_url": "sqlite:////proc/none/ledger.sqlite"}},
    "skyward_aws_default": {
        "conn_type": "skyward_aws",
        "login": "AKIA",
        "password": SECRET,
        "extra": {"region": "us-east-1, eu-west-1"},
    },
    "aws_default": {"conn_type": "aws", "login": "AKIB", "password": SECRET, "extra": {"region_name": "eu-west-1"}},
    "skyward_runpod_default": {"conn_type": "skyward_runpod", "password": SECRET, "extra": {"cloud": "secure"}},
    "skyward_vastai_default": {"conn_type": "skyward_vastai", "password": SECRET},
    "skyward_verda_default": {"conn_type": "skyward_verda", "login": "id", "password": SECRET},
    "skyward_digitalocean_default": {"conn_type": "skyward_digitalocean", "password": SECRET},
}

PROGRAM = """
import json, sys
from airflow.providers_manager import ProvidersManager
from airflow.sdk import ExceptionRetryPolicy
import skyward_core as sky
from airflow_provider_skyward import hooks, retry

KINDS = (hooks.AWSHook, hooks.RunPodHook, hooks.VastAIHook, hooks.VerdaHook, hooks.DigitalOceanHook)
SECRETS = ("access_key_id", "secret_access_key", "api_key", "client_id", "client_secret", "token")

def fields(provider):
    secrets = {name: getattr(provider, name, None) for name in SECRETS}
    return {"json": provider.to_json(), "repr": repr(provider)} | {
        name: value.get_secret_value() for name, value in secrets.items() if value is not None}

manager = ProvidersManager()
policy = retry.default_retry_policy()
again = ExceptionRetryPolicy.deserialize(policy.serialize())

def decided(error):
    decision = again.evaluate(error, 1, 3)
    delay = decision.retry_delay
    return [decision.action.value, None if delay is None else delay.total_seconds()]

def tested(kind, account):
    provider = getattr(sky, kind.provider_class)
    def answer(self):
        if isinstance(account, Exception):
            raise account
        return account
    provider.account = answer
    return kind().test_connection()

print("ANSWER", json.dumps({
    "hooks": {name: hook.hook_name for name, hook in manager.hooks.items() if hook and name.startswith("skyward")},
    "widgets": sorted(name for name in manager.connection_form_widgets if "skyward" in name),
    "providers": {kind.conn_type: fields(kind().get_conn()) for kind in KINDS},
    "aws_default": fields(hooks.AWSHook("aws_default").get_conn()),
    "ledger": hooks.SkywardHook().get_conn(),
    "ledger_test": hooks.SkywardHook().test_connection(),
    "no_ledger_test": hooks.SkywardHook("no_ledger").test_connection(),
    "missing_test": hooks.SkywardHook("there is none").test_connection(),
    "account_test": tested(hooks.RunPodHook, "acc-1"),
    "refused_test": tested(hooks.VerdaHook, sky.CredentialsError("refused")),
    "retries": {type(error).__name__: decided(error) for error in (
        sky.NoCapacity(), sky.QuotaExceeded(), sky.NodeLost(), sky.BudgetExceeded("none left"), sky.CredentialsError(),
        sky.BadRequest(), sky.NotPicklable("no"), ValueError())},
}))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("airflow")
    connections = {
        f"AIRFLOW_CONN_{name.upper()}": json.dumps(value).replace("{home}", str(home))
        for name, value in CONNECTIONS.items()
    }
    environ = {**os.environ, **connections, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    program = home / "program.py"
    program.write_text(PROGRAM)
    ran = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, timeout=100)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, ran.stdout + ran.stderr
    return json.loads(lines[0].removeprefix("ANSWER "))


def test_airflow_knows_each_connection_type_and_its_form(answer: dict[str, Any]) -> None:
    """Airflow loads our six hooks by the provider info, and has a form field for each of our extras."""
    names = {"skyward", "skyward_aws", "skyward_runpod", "skyward_vastai", "skyward_verda", "skyward_digitalocean"}
    assert set(answer["hooks"]) == names
    assert "extra__skyward__ledger_url" in answer["widgets"]
    assert {name for name in answer["widgets"] if name.endswith("__region")} == {
        f"extra__{name}__region" for name in names - {"skyward"}
    }


def test_a_connection_becomes_a_provider_that_shows_no_secret(answer: dict[str, Any]) -> None:
    """Each cloud's connection fills the fields of its provider; neither its JSON nor its text has the secret."""
    providers = answer["providers"]
    assert (providers["skyward_aws"]["access_key_id"], providers["skyward_aws"]["secret_access_key"]) == (
        "AKIA",
        SECRET,
    )
    assert providers["skyward_aws"]["json"]["region"] == ["us-east-1", "eu-west-1"]
    assert providers["skyward_runpod"]["api_key"] == providers["skyward_vastai"]["api_key"] == SECRET
    assert providers["skyward_runpod"]["json"]["cloud"] == "secure"
    assert (providers["skyward_verda"]["client_id"], providers["skyward_verda"]["client_secret"]) == ("id", SECRET)
    assert providers["skyward_digitalocean"]["token"] == SECRET
    assert not [name for name, one in providers.items() if SECRET in one["repr"] + json.dumps(one["json"])]


def test_a_connection_of_amazons_provider_is_used_too(answer: dict[str, Any]) -> None:
    """`aws_default` works without the Amazon provider, with its own name for the region."""
    aws = answer["aws_default"]
    assert (aws["access_key_id"], aws["secret_access_key"]) == ("AKIB", SECRET)
    assert aws["json"]["region"] == "eu-west-1"


def test_the_test_of_a_connection_answers_with_a_reason(answer: dict[str, Any]) -> None:
    """The test reads from the ledger or queries the account; a failure has the error's name and text."""
    assert set(answer["ledger"]) == {"SKYWARD_LEDGER", "SKYWARD_SECRET_KEY"}
    assert answer["ledger"]["SKYWARD_SECRET_KEY"] == SECRET
    assert answer["ledger_test"] == [True, "the ledger answers"]
    assert answer["no_ledger_test"][0] is False
    assert "LedgerError" in answer["no_ledger_test"][1]
    assert answer["missing_test"][0] is False
    assert answer["account_test"] == [True, "the credentials are valid for the account acc-1"]
    assert answer["refused_test"] == [False, "CredentialsError: refused"]


def test_the_retry_policy_decides_by_the_error(answer: dict[str, Any]) -> None:
    """After Airflow has stored the policy and read it again: wait for capacity, replace a lost node at once, and fail
    where another try cannot help.
    """
    assert answer["retries"] == {
        "NoCapacity": ["retry", 600.0],
        "QuotaExceeded": ["retry", 600.0],
        "NodeLost": ["retry", 0.0],
        "BudgetExceeded": ["fail", None],
        "CredentialsError": ["fail", None],
        "BadRequest": ["fail", None],
        "NotPicklable": ["fail", None],
        "ValueError": ["default", None],
    }
