"""What docker-compose.yml says of each service, and how the service runs without containers.

Only the keys that the file uses are read. `tests/unit/stack/test_compose.py` checks the file by the schema of the compose
specification.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
DEVELOPMENT = ROOT / "development.env"
OURS = re.compile(r"skyward-stack:[\w.]+")
"""The image whose programs are those of this environment, so that its services run here by the same commands."""
VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<default>[^}]*))?\})")
SECONDS = re.compile(r"(\d+)s")


@dataclass(frozen=True)
class Health:
    """A command that succeeds when the service is healthy, and the seconds between two tries and for one."""

    command: tuple[str, ...]
    interval_seconds: float
    timeout_seconds: float


@dataclass(frozen=True)
class Service:
    """A service as processes of this machine. `needs` has a condition for each service that must be there before."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    needs: Mapping[str, str]
    health: Health | None
    stop_signal: str
    stop_seconds: float
    """How long it may take to end; then it is killed."""
    user: str | None
    path: str | None
    """A folder of programs, before PATH."""
    volumes: tuple[str, ...]
    """Folders that are there before the service starts."""

    @property
    def runs_once(self) -> bool:
        return self.health is None


def read(path: Path = FILE) -> dict[str, Any]:
    """Return the file with its anchors resolved, and its variables as they are written."""
    return cast(dict[str, Any], yaml.safe_load(path.read_text()))


def filled(value: Any, variables: Mapping[str, str]) -> Any:
    """Return the value with its variables filled in.

    Raises KeyError if one has neither a value nor a default; the name is its argument.
    """
    if isinstance(value, dict):
        return {key: filled(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, variables) for item in value]
    return VARIABLE.sub(lambda found: _value_of(found, variables), value) if isinstance(value, str) else value


def _value_of(found: re.Match[str], variables: Mapping[str, str]) -> str:
    if found["dollar"]:
        return "$"
    if value := variables.get(found["name"]):
        return value
    if found["kind"] == ":-":
        return found["default"]
    raise KeyError(found["name"])


def variables_of(value: Any) -> dict[str, str | None]:
    """Return the names of the variables in the value, with their defaults; None if a variable has no default."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return {name: default for item in inner for name, default in variables_of(item).items()}
    found = [match for match in VARIABLE.finditer(value) if match["name"]] if isinstance(value, str) else []
    return {match["name"]: match["default"] if match["kind"] == ":-" else None for match in found}


def services(content: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Service]:
    """Return all services as processes, each after those that it needs.

    Raises ValueError for a service that cannot run here, and for a circle.
    """
    made = {name: service(name, filled(body, variables)) for name, body in content["services"].items()}
    ordered: dict[str, Service] = {}
    while len(ordered) < len(made):
        ready = [one for one in made.values() if one.name not in ordered and ordered.keys() >= one.needs.keys()]
        if not ready:
            raise ValueError(
                f"these services wait for each other, or for others that are missing: {made.keys() - ordered.keys()}"
            )
        ordered |= {one.name: one for one in ready}
    return ordered


def service(name: str, body: Mapping[str, Any]) -> Service:
    """Return one service, whose variables are filled in.

    Raises ValueError if its image is not ours, and `x-native` does not say how it runs without it.
    """
    native = body.get("x-native", {})
    command = [*native.get("entrypoint", []), *native.get("command", body["command"])]
    if not native.keys() & {"entrypoint", "command"} and not OURS.fullmatch(body["image"]):
        raise ValueError(f"{name}: {body['image']} cannot run here. Give it x-native with a command or an entrypoint")
    return Service(
        name=name,
        command=tuple(command),
        environment={key: str(value) for key, value in body.get("environment", {}).items()},
        folder=body.get("working_dir", str(ROOT)),
        needs={other: need["condition"] for other, need in body.get("depends_on", {}).items()},
        health=_health(body["healthcheck"], native.get("healthcheck")) if "healthcheck" in body else None,
        stop_signal=native.get("stop_signal", body.get("stop_signal", "SIGTERM")),
        stop_seconds=_seconds(body.get("stop_grace_period", "10s")),
        user=native.get("user"),
        volumes=tuple(volume.split(":")[1] for volume in body.get("volumes", [])),
        path=max(glob(native["path"]), default=native["path"]) if "path" in native else None,
    )


def _health(body: Mapping[str, Any], native_test: list[str] | None) -> Health:
    kind, *command = native_test or body["test"]
    if kind != "CMD":
        raise ValueError(f"a health check is a list that begins with CMD, not with {kind}")
    return Health(tuple(command), _seconds(body["interval"]), _seconds(body["timeout"]))


def _seconds(text: str) -> float:
    found = SECONDS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no number of seconds such as 5s")
    return float(found[1])


def read_env(path: Path = DEVELOPMENT) -> dict[str, str]:
    """Return the variables of an env file: NAME=value in each line that is no comment."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)
