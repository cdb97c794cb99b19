"""Volumes on real hosts, with a real S3 protocol (moto's server): mounts, refusals, reports and unmounts."""

import contextlib
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import boto3
import pytest

from skyward_core.image import shell
from skyward_core.image.volume import S3Volume, Volume
from skyward_core.image.volume_shell import mount_volumes
from skyward_core.providers.termination_shell import ENDING
from tests.conftest import wait_until
from tests.testbed import Fleet, Host, why_not

SECRET = "wJalrXUtnFEMIsecretEXAMPLEKEY"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET}
OBJECTS = {"top.txt": "top", "datasets/a.txt": "a", "datasets/deep/b.txt": "b", "other/c.txt": "c"}


@dataclass
class Service:
    """An S3 service for hosts; it accepts any key, but gives private objects only to signed requests."""

    url: str

    @contextlib.contextmanager
    def client(self):
        names = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=self.url, **names)
        try:
            yield client
        finally:
            client.close()

    def fill(self, bucket: str, objects: dict[str, str], acl: str = "private") -> None:
        with self.client() as client:
            client.create_bucket(Bucket=bucket)
            for key, text in objects.items():
                client.put_object(Bucket=bucket, Key=key, Body=text.encode(), ACL=acl)

    def objects(self, bucket: str) -> dict[str, str]:
        """Return the objects of the bucket, without the empty ones that represent folders."""
        with self.client() as client:
            keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
            return {
                key: client.get_object(Bucket=bucket, Key=key)["Body"].read().decode()
                for key in keys
                if not key.endswith("/")
            }


@dataclass
class Node:
    """A host, and the directory of an instance on it."""

    host: Host
    directory: str
    service: Service
    env: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    """The command that runs the script."""

    def mount(
        self, *volumes: Volume, env: dict[str, str] | None = None, endpoint: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            "SKYWARD_INSTANCE_DIRECTORY": self.directory,
            "AWS_ENDPOINT_URL_S3": endpoint or self.service.url,
            **self.env,
            **(KEYS if env is None else env),
        }
        script = shell.script(shell.prelude(), shell.export(variables), mount_volumes(volumes), shell.done("volumes"))
        return self.host.run(f"mkdir -p {self.directory}; {self.prefix} bash -s 2>&1", text=script, seconds=110.0)

    def unmount(self) -> subprocess.CompletedProcess[str]:
        """Unmount all volumes, as at the end of a node."""
        return self.host.run(f"{self.prefix} sh -s 2>&1", text=f"{ENDING}skyward_unmount {self.directory}\n")

    def said(self, command: str) -> str:
        done = self.host.run(command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def mounts(self) -> list[str]:
        """Return the FUSE mount points, in the order of mounting."""
        return self.said("findmnt --noheadings --raw --output TARGET,FSTYPE | awk '$2 ~ /^fuse/ {print $1}'").split()

    def listed(self) -> list[str]:
        return self.said(f"cat {self.directory}/mounts").split("\n")

    def daemons(self) -> list[str]:
        """Return the pids of the living s3fs processes."""
        return self.host.run("pgrep -x s3fs").stdout.split()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Yield a fleet for the tests of this file."""
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def hosts(fleet: Fleet) -> tuple[Host, Host]:
    """Return two hosts with a FUSE device."""
    return with_fuse(fleet.create()), with_fuse(fleet.create())


def with_fuse(host: Host) -> Host:
    """Create the device on the host, because there is no udev."""
    done = host.run("[ -e /dev/fuse ] || mknod -m 666 /dev/fuse c 10 229")
    assert done.returncode == 0, done.stderr
    return host


@pytest.fixture(scope="module")
def service(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield the service, with the bucket `weather`."""
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as output:
        argv = [sys.executable, "-m", "moto.server", "--host", fleet.network.gateway, "--port", "0"]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        wait_until(lambda: "Running on http" in log.read_text() or process.poll() is not None, "moto's server")
        assert process.poll() is None, log.read_text()
        service = Service(re.search(r"Running on (http://[0-9.:]+)", log.read_text())[1])
        service.fill("weather", OBJECTS)
        yield service
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def nodes(hosts: tuple[Host, Host], service: Service, request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Yield one instance on each host; afterwards none of their volumes is left."""
    name = re.sub(r"\W", "-", request.node.name)
    nodes = tuple(Node(host, f"/root/{name}", service) for host in hosts)
    yield nodes
    for node in nodes:
        node.unmount()
        wait_until(lambda node=node: not node.daemons(), f"s3fs to end on {node.host.name}")
        assert node.mounts() == []


@pytest.fixture
def node(nodes: tuple[Node, Node]) -> Node:
    return nodes[0]


@dataclass
class RefusingService:
    """An S3 service that refuses every request, and keeps the credentials of each."""

    url: str
    seen: list[dict[str, str]]


@pytest.fixture
def refusing_service(fleet: Fleet) -> Iterator[RefusingService]:
    """Yield a service that answers each request with 403."""
    seen: list[dict[str, str]] = []

    class Refusal(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer((fleet.network.gateway, 0), Refusal)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield RefusingService(f"http://{fleet.network.gateway}:{server.server_port}", seen)
    server.shutdown()
    thread.join()
    server.server_close()


def data(**fields: object) -> S3Volume:
    return S3Volume(**{"mount_path": "/data", "bucket": "weather", **fields})


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line that reports the failure."""
    assert done.returncode != 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("::skyward failed")]
    assert "::skyward done" not in done.stdout
    return line


# ── reading and writing ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_read_only_volume_is_read_only_on_every_host(nodes, service):
    """Two hosts see only the keys below the prefix.

    Nothing can be written, changed or removed; the bucket is unchanged.
    """
    for node in nodes:
        done = node.mount(data(prefix="datasets"))
        assert (done.returncode, done.stdout) == (0, "::skyward phase volumes\n::skyward done phase=volumes\n")
        assert node.said("cd /data && find . -type f | sort") == "./a.txt\n./deep/b.txt"
        assert node.said("cat /data/a.txt /data/deep/b.txt") == "ab"
        for attempt in (
            "echo x > /data/new",
            "echo x > /data/a.txt",
            "rm /data/a.txt",
            "mkdir /data/folder",
            "touch /data/a.txt",
        ):
            refused = node.host.run(attempt)
            assert refused.returncode != 0
            assert "Read-only file system" in refused.stderr
    assert service.objects("weather") == OBJECTS


# ── credentials ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_credentials_reach_only_the_service(node, refusing_service):
    """Requests are signed with the environment's key and carry its token.

    Neither secret nor token is printed, even if the service refuses.
    """
    token = "FwoGZXIvYXdzEtokenEXAMPLE"
    done = node.mount(data(), env={**KEYS, "AWS_SESSION_TOKEN": token}, endpoint=refusing_service.url)
    assert re.fullmatch(r"::skyward failed phase=volumes exit=1 command=s3fs weather /data -o \S+", refusal(done))
    assert "invalid credentials" in done.stdout
    assert all(
        f"Credential={KEYS['AWS_ACCESS_KEY_ID']}/" in request["authorization"] for request in refusing_service.seen
    )
    assert {request["x-amz-security-token"] for request in refusing_service.seen} == {token}
    assert SECRET not in done.stdout
    assert token not in done.stdout


def test_secrets_are_not_in_command_lines(node):
    """No process that serves a volume has a key in its command line, and no file of the instance has one."""
    assert node.mount(data(), env={**KEYS, "AWS_SESSION_TOKEN": "token-EXAMPLE"}).returncode == 0
    commands = node.said("ps -e -ww -o args")
    assert "s3fs weather /data" in commands
    assert not any(word in commands for word in (SECRET, KEYS["AWS_ACCESS_KEY_ID"], "token-EXAMPLE"))
    assert node.host.run(f"grep -r {SECRET} {node.directory}").returncode == 1


def test_without_credentials_a_public_bucket_is_read(node, service):
    """Requests are not signed: public objects are read, private ones are not."""
    service.fill("open", {"all.txt": "for all"}, acl="public-read")
    assert node.mount(data(bucket="open"), S3Volume(mount_path="/private", bucket="weather"), env={}).returncode == 0
    assert node.said("cat /data/all.txt") == "for all"
    # s3fs 1.90 shows unreadable objects as empty files
    assert "top" not in node.host.run("cat /private/top.txt").stdout


def test_without_credentials_the_error_names_what_is_missing(node, refusing_service):
    """The service needs credentials, so the phase fails, and the output names what is missing."""
    done = node.mount(data(), env={}, endpoint=refusing_service.url)
    assert refusal(done).startswith("::skyward failed phase=volumes exit=1 command=s3fs weather /data")
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in done.stdout
    assert refusing_service.seen
    assert not any("authorization" in request for request in refusing_service.seen)


def test_a_mount_path_with_files_is_refused(node):
    """The volume would hide the files."""
    node.said("mkdir -p /full && touch /full/.file")
    done = node.mount(data(mount_path="/full"))
    assert "exit=1 command=clear /full" in refusal(done)
    assert "/full is not empty" in done.stdout


def test_unmounting_removes_all_mounts_and_can_be_repeated(node):
    """All paths of the list are unmounted, also busy or broken ones, and s3fs ends. A second call changes nothing."""
    assert (
        node.mount(
            data(), S3Volume(mount_path="/busy", bucket="weather"), S3Volume(mount_path="/dead", bucket="weather")
        ).returncode
        == 0
    )
    node.said("cd /busy && (exec setsid sleep 60 >/dev/null 2>&1 &)")
    node.said("pkill -KILL -f 's3fs weather /dead'")
    assert node.unmount().stdout == ""
    assert node.mounts() == []
    node.said("pkill -x sleep")
    wait_until(lambda: not node.daemons(), "s3fs to end")
    assert node.unmount().stdout == ""
