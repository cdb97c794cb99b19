"""A short test of one of the four parts, in the environment that runs it.

Run it as `python smoke.py core|prefect|airflow|dagster` in an empty working directory. `tests/versions` runs it in
environments that have no pytest. It ends with an exception at the first failure.
"""

import asyncio
import importlib
import importlib.metadata
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
START_SECONDS = 120.0
OURS = {"prefect": "prefect_skyward", "airflow": "airflow_provider_skyward", "dagster": "dagster_skyward"}

PREFECT_FLOW = """
from prefect import flow, get_run_logger, runtime, task
from prefect_skyward import SkywardTaskRunner
import skyward_core as sky

@task
def twice(x: int) -> int:
    print("twice", x)
    return 2 * x

@flow(task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=1.2)), log_prints=True)
def smoke() -> list[int]:
    return twice.map([1, 2]).result()

@task
def half(number: float) -> float:
    get_run_logger().info("half of %s", number)
    return number / 2

@task
def quarter(number: float) -> tuple[str, float]:
    return runtime.task_run.task_name, half.submit(half(number)).result()

@flow(task_runner=SkywardTaskRunner(provider=sky.Local(), prefect_context=True))
def in_context() -> tuple[str, float]:
    return quarter.submit(10).result()

if __name__ == "__main__":
    assert smoke() == [2, 4]
    assert in_context() == ("quarter", 2.5)
"""

AIRFLOW_DAG = """
from airflow.sdk import dag, task
import skyward_core as sky

@dag(schedule=None)
def smoke():
    @task.skyward(provider=sky.Local(price_per_hour=1.2), map_over="x")
    def twice(x: int) -> int:
        return 2 * x

    @task
    def check(values: list[int]) -> None:
        assert list(values) == [2, 4], values

    check(twice([1, 2]))

smoke()
"""

DAGSTER_DEFINITIONS = """
import dagster as dg
import skyward_core as sky
from dagster_skyward import SkywardResource

def twice(x: int) -> int:
    return 2 * x

@dg.asset
def doubled(context: dg.AssetExecutionContext, compute: SkywardResource) -> int:
    return compute.run(context, twice, 2).value

resources = {"compute": SkywardResource(provider=sky.Local(price_per_hour=1.2))}
defs = dg.Definitions(assets=[doubled], resources=resources)

if __name__ == "__main__":
    result = dg.materialize([doubled], resources=resources)
    assert result.success and result.output_for_node("doubled") == 4
"""


WITH_JOBLIB = (".sklearn.backend",)
"""Modules that import joblib, which is the user's own package. They are imported when a pool becomes its backend."""


def core() -> None:
    """Import every module; use a ledger, a TLS pool with a call, an SSH session, the command, and the drivers of the
    installed extras.
    """
    import skyward_core as sky

    for module in pkgutil.walk_packages(sky.__path__, "skyward_core."):
        if not module.name.endswith(("__main__", *WITH_JOBLIB)) and "distributed" not in module.name:
            importlib.import_module(module.name)
    traces = sky.Traces() if importlib.util.find_spec("opentelemetry") is not None else None
    machines = sky.Local(price_per_hour=1.2)
    with sky.ComputePool(provider=machines, nodes=2, display="log", max_cost=5, on_event=traces) as pool:
        assert sorted(sky.compute(os.getpid)() @ pool) != []
        assert pool.map(sky.compute(lambda x: 2 * x), [1, 2]) == [2, 4]
    run(str(BIN / "skyward"), "receipt", pool.receipt["pool_id"])
    run(str(BIN / "skyward"), "cost", "--by", "bucket")
    asyncio.run(_ssh())
    if importlib.util.find_spec("psycopg") is not None:
        importlib.import_module("psycopg")
    if importlib.util.find_spec("boto3") is not None:
        import boto3

        boto3.client("ec2", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none")


async def _ssh() -> None:
    """A server and a client of asyncssh, as our transport uses it."""
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519")

    class Server(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return True

        def public_key_auth_supported(self) -> bool:
            return True

        def validate_public_key(self, username: str, key: Any) -> bool:
            return True

    async def answer(process: Any) -> None:
        process.stdout.write("hello")
        process.exit(0)

    server = await asyncssh.create_server(
        Server, "127.0.0.1", 0, server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")], process_factory=answer
    )
    port, no_files = server.sockets[0].getsockname()[1], {"known_hosts": None, "config": None, "agent_path": None}
    async with asyncssh.connect("127.0.0.1", port, username="me", client_keys=[key], **no_files) as client:
        assert (await client.run("anything")).stdout == "hello"
    server.close()


def prefect() -> None:
    """A Prefect server, with our collection, and two flows: tasks on a pool, and with Prefect's context there."""
    port = free_port()
    environ = {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_HOME": str(Path("prefect").absolute()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    Path("smoke_flow.py").write_text(PREFECT_FLOW)
    start = (str(BIN / "prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(port))
    with server(environ, *start) as process:
        wait_for(f"http://127.0.0.1:{port}/api/health", process)
        run(sys.executable, "smoke_flow.py", environ=environ)


def airflow() -> None:
    """A database, a DAG that runs a step on a pool, and the API server."""
    port = free_port()
    environ = {
        "AIRFLOW_HOME": str(Path("airflow").absolute()),
        "AIRFLOW__CORE__DAGS_FOLDER": str(Path("dags").absolute()),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    }
    Path("dags").mkdir()
    Path("dags/smoke.py").write_text(AIRFLOW_DAG)
    run(str(BIN / "airflow"), "db", "migrate", environ=environ)
    start = (str(BIN / "airflow"), "api-server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    with server(environ, *start) as process:
        run(str(BIN / "airflow"), "dags", "test", "smoke", environ=environ)
        wait_for(f"http://127.0.0.1:{port}/api/v2/monitor/health", process)


def dagster() -> None:
    """An asset with a function that runs on a pool, and the webserver over its definitions."""
    Path("dagster").mkdir()
    Path("dagster/dagster.yaml").write_text("telemetry: {enabled: false}\nnux: {enabled: false}\n")
    Path("smoke_definitions.py").write_text(DAGSTER_DEFINITIONS)
    port, environ = free_port(), {"DAGSTER_HOME": str(Path("dagster").absolute())}
    start = (str(BIN / "dagster-webserver"), "-f", "smoke_definitions.py", "-h", "127.0.0.1", "-p", str(port))
    with server(environ, *start) as process:
        run(sys.executable, "smoke_definitions.py", environ=environ)
        wait_for(f"http://127.0.0.1:{port}/server_info", process)


def run(*command: str, environ: dict[str, str] | None = None) -> None:
    """Run a command; its output goes to our output."""
    print("$", *command, flush=True)
    subprocess.run(command, env=os.environ | (environ or {}), check=True)


@contextmanager
def server(environ: dict[str, str], *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server in its own process group, and end the group."""
    print("$", *command, flush=True)
    with subprocess.Popen(command, env=os.environ | environ, process_group=0) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers with 200; fail if it ends before."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                print(url, answer.status, flush=True)
                return
        except (urllib.error.URLError, OSError) as error:
            trouble = str(error)
        assert process.poll() is None, f"the server ended with {process.returncode} before it answered"
        assert time.monotonic() < deadline, f"{url} did not answer in {START_SECONDS:.0f} s: {trouble}"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with it
    name = sys.argv[1]
    {"core": core, "prefect": prefect, "airflow": airflow, "dagster": dagster}[name]()
    print(json.dumps({"smoke": name, "ok": True}))
