"""Run the services of docker-compose.yml as processes of this machine until Ctrl-C: `python -m tests.stack`.

`python -m tests.stack down` ends them from another shell. A variable of the compose file may be set in the
environment: `PREFECT_PORT=4300`, or `STACK_DATA` for the folder. The others come from the file that is the argument,
`development.env` by default. COMPOSE_FILE may name another compose file, as for docker compose.
"""

import os
import signal
import sys
import time
from pathlib import Path

from skyward_core.wire.private_folders import make_private
from tests.stack.compose import DEVELOPMENT, FILE, read, read_env, services, variables_of
from tests.stack.native import Stack, StackError, check_ports, claim, native_variables, take_down

PAGES = {"PREFECT_PORT": "Prefect", "AIRFLOW_PORT": "Airflow", "DAGSTER_PORT": "Dagster"}
READY = "The stack is ready. Ctrl-C, or `make stack-down`, ends it."


def main(env_file: Path) -> None:
    started = time.monotonic()
    os.umask(0o077)  # logs have passwords: Airflow writes that of its user
    content = read(Path(os.environ.get("COMPOSE_FILE") or FILE))
    folder = own_folder(folder_of_user())
    claim(folder)
    variables = read_env(env_file) | native_variables(content, os.environ, folder)
    ports = {
        name: variables.get(name) or default or ""
        for name, default in variables_of(content).items()
        if name.endswith("_PORT")
    }
    check_ports(ports)
    stack = Stack(services(content, variables), folder)
    try:
        for name in stack.start():
            print(f"{time.monotonic() - started:5.1f} s  {name}", flush=True)
        for name in PAGES.keys() & ports.keys():
            print(f"{PAGES[name]}: http://127.0.0.1:{ports[name]}")
        print(f"Data and logs: {folder}\n{READY}", flush=True)
        stack.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the end is not interrupted
        print("ending all services", flush=True)
        stack.stop()


def down() -> None:
    folder = folder_of_user()
    if os.path.lexists(folder):
        own_folder(folder)
    if left := take_down(folder):
        print(f"{left} processes were left by a stack that was killed")
    print(f"Nothing of the stack in {folder} runs. Its data is kept: remove the folder to begin anew.")


def folder_of_user() -> Path:
    return Path(os.environ.get("STACK_DATA") or f"/var/tmp/skyward-stack-{os.getuid()}")


def own_folder(folder: Path) -> Path:
    """Make the folder, or check the one that is there: it is closed to other users, and none of them could exchange it.

    Raises StackError.
    """
    try:
        return make_private(folder)
    except OSError as error:
        raise StackError(f"{error}: set STACK_DATA to another folder") from error


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        if sys.argv[1:] == ["down"]:
            down()
        else:
            main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEVELOPMENT)
    except KeyboardInterrupt:
        pass
    except (StackError, KeyError, FileNotFoundError) as error:
        sys.exit(f"error: {error}" if not isinstance(error, KeyError) else f"error: {error} is not set")
