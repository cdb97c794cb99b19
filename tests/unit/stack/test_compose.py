"""docker-compose.yml is valid and safe, and says of each service how it runs without containers."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.stack.compose import DEVELOPMENT, OURS, ROOT, filled, read, read_env, services, variables_of

CONTENT = read()
SERVICES: Mapping[str, Any] = CONTENT["services"]
SCHEMA = Path(__file__).parents[2] / "stack" / "compose_spec.json"
"""The schema of the compose specification, from Debian's package docker-compose 1.29.2-3 (Apache-2.0)."""
SECRET = re.compile(r"PASSWORD|SECRET|_KEY\b|FERNET|ACCESS_KEY", re.IGNORECASE)
PINNED = re.compile(r"[\w./-]+:[\w.-]*\d[\w.-]*")
EXPECTED = {
    *("postgres", "s3", "aws", "node-1", "node-2", "prefect-server", "prefect-worker"),
    *("airflow-api-server", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"),
    *("dagster-code", "dagster-webserver", "dagster-daemon"),
}
"""The services of the stack, without those that run once."""
RUN_OUR_CODE = {
    *("prefect-worker", "dagster-code", "airflow-migrate"),
    *("airflow-api-server", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"),
}
LEDGER = "postgresql+psycopg://skyward:development-only@postgres:5432/skyward"
BECOMES_A_USER = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"]
"""What an entrypoint of root needs in order to give folders to another user, and to become that user."""


def native(**variables: str) -> Any:
    return services(CONTENT, read_env() | variables)


def test_the_file_is_valid_by_the_specification() -> None:
    """The schema allows no unknown key, and knows the kinds of all values."""
    jsonschema.Draft201909Validator(json.loads(SCHEMA.read_text())).validate(CONTENT)


def test_every_service_is_healthy_or_ends() -> None:
    """A service has a health check; one that runs once has none, and others wait until it has succeeded."""
    once = {name for name, body in SERVICES.items() if "healthcheck" not in body}
    assert SERVICES.keys() - once == EXPECTED
    assert {SERVICES[name]["restart"] for name in once} == {"no"}
    assert {SERVICES[name]["restart"] for name in EXPECTED} == {"unless-stopped"}
    waits = [
        (other, need["condition"]) for body in SERVICES.values() for other, need in body.get("depends_on", {}).items()
    ]
    assert {condition for other, condition in waits if other in once} == {"service_completed_successfully"}
    assert {condition for other, condition in waits if other not in once} == {"service_healthy"}


def test_every_image_is_pinned() -> None:
    """Each image of the compose file and of the Dockerfile has a tag with a version."""
    images = {body["image"] for body in SERVICES.values()}
    bases = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert [image for image in (images | set(bases)) - stages if not PINNED.fullmatch(image)] == []


def test_no_image_runs_as_root() -> None:
    """The last user of each image that is used is not root."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    users = {stage.split()[2]: re.findall(r"^USER (\S+)", stage, re.MULTILINE)[-1:] for stage in stages}
    built = {body["build"]["target"] for body in SERVICES.values() if "build" in body}
    assert built == {"stack", "node"}
    assert {target: users[target] for target in built} == {"stack": ["1000:1000"], "node": ["1000:1000"]}


def test_the_packages_have_the_version_of_the_image() -> None:
    """Git is not in the image, so that the version is an argument of the build."""
    (version,) = re.findall(r"^ARG VERSION=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {body["image"].split(":")[1] for body in SERVICES.values() if "build" in body} == {version}


def test_no_secret_has_a_default_outside_the_development_file() -> None:
    """Each secret is a variable without a default, and all of them are in the file that is marked."""
    needed = {name for name, default in variables_of(CONTENT).items() if default is None}
    assert needed
    assert [
        name for name, default in variables_of(CONTENT).items() if SECRET.search(name) and default is not None
    ] == []
    texts = [
        (key, value)
        for body in SERVICES.values()
        for key, value in body.get("environment", {}).items()
        if SECRET.search(key) and key != "HOST_KEY"  # the path of a key
    ]
    assert texts
    assert [key for key, value in texts if not re.fullmatch(r"\$\{\w+:\?\}", value)] == []
    passwords = re.findall(r"://\w+:([^@/]+)@", (ROOT / "docker-compose.yml").read_text())
    assert [text for text in passwords if not re.fullmatch(r"\$\{\w+:\?\}", text)] == []
    assert DEVELOPMENT.read_text().startswith("# DEVELOPMENT ONLY")
    assert read_env().keys() == needed | {"AIRFLOW_ALL_ADMINS"}


def test_only_this_machine_reaches_the_services() -> None:
    """Each published port is one of 127.0.0.1."""
    ports = [port for body in SERVICES.values() for port in body.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_no_service_has_more_rights_than_it_needs() -> None:
    """No capability, no way to another one, no folder or socket of this machine; the entrypoint of PostgreSQL's image
    becomes another user.
    """
    assert {name: body["cap_drop"] for name, body in SERVICES.items()} == {name: ["ALL"] for name in SERVICES}
    assert {name: body["cap_add"] for name, body in SERVICES.items() if "cap_add" in body} == {
        "postgres": BECOMES_A_USER
    }
    assert [name for name, body in SERVICES.items() if body["security_opt"] != ["no-new-privileges:true"]] == []
    assert [
        name for name, body in SERVICES.items() if body.keys() & {"privileged", "network_mode", "pid", "devices"}
    ] == []
    volumes = {volume.split(":")[0] for body in SERVICES.values() for volume in body.get("volumes", [])}
    assert volumes == CONTENT["volumes"].keys()
    writers = [
        name
        for name, body in SERVICES.items()
        if any("-keys:" in one and not one.endswith(":ro") for one in body.get("volumes", []))
    ]
    assert writers == ["setup"]


def test_all_services_that_run_our_code_have_one_ledger_and_one_key() -> None:
    """The others have neither."""
    said = filled(CONTENT, read_env())["services"]
    names = ("SKYWARD_LEDGER", "SKYWARD_SECRET_KEY")
    found = {name: tuple(body.get("environment", {}).get(key) for key in names) for name, body in said.items()}
    key = read_env()["SKYWARD_SECRET_KEY"]
    assert found == {name: (LEDGER, key) if name in RUN_OUR_CODE else (None, None) for name in SERVICES}


def test_orchestrators_keep_their_state_in_postgresql() -> None:
    """Each one in its own database, as its own user."""
    said = filled(CONTENT, read_env())["services"]
    at = "://{0}:development-only@postgres:5432/{0}"
    assert said["prefect-server"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"].endswith(
        at.format("prefect")
    )
    for name in ("airflow-api-server", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"):
        assert said[name]["environment"]["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].endswith(at.format("airflow"))
    for name in ("dagster-code", "dagster-webserver", "dagster-daemon"):
        assert said[name]["environment"]["DAGSTER_DB_URL"].endswith(at.format("dagster"))
    configuration = yaml.safe_load((ROOT / "stack/dagster/dagster.yaml").read_text())
    assert configuration["storage"] == {"postgres": {"postgres_url": {"env": "DAGSTER_DB_URL"}}}


# ── the same services without containers ─────────────────────────────────────────────────────────────────────────────


def test_the_native_services_are_those_of_the_file() -> None:
    """Each service is there, with its command, environment and health check. Only its image is replaced."""
    variables = read_env()
    found = native()
    assert found.keys() == SERVICES.keys()
    for name, body in SERVICES.items():
        said = filled(body, variables)
        own = said.get("x-native", {})
        assert list(found[name].command) == own.get("entrypoint", []) + own.get("command", said["command"])
        assert f"{found[name].stop_seconds:.0f}s" == said["stop_grace_period"]
        assert found[name].environment == said.get("environment", {})
        signals = {"stop_signal": "SIGTERM"} | said | own
        assert found[name].stop_signal == signals["stop_signal"]
        assert found[name].needs.keys() == said.get("depends_on", {}).keys()
        assert (found[name].health is None) == ("healthcheck" not in said)
        if found[name].health:
            assert list(found[name].health.command) == own.get("healthcheck", said["healthcheck"]["test"])[1:]
        if OURS.fullmatch(said["image"]):
            assert not own, "our image has the programs of this environment: the same command runs here"


def test_without_secrets_nothing_starts() -> None:
    """A variable without a default and without a value is refused by its name."""
    with pytest.raises(KeyError, match="POSTGRES_PASSWORD"):
        services(CONTENT, read_env() | {"POSTGRES_PASSWORD": ""})
