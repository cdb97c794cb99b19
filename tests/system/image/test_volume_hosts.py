"""Volumes on real hosts, with a real S3 protocol (moto's server): mounts, refusals, reports and unmounts."""

import contextlib
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import boto3
import pytest

from skyward_core.image import shell
from skyward_core.image.volume import S3Volume, Volume, mount_volumes
from skyward_core.providers.termination_shell import ENDING
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.waiting import wait_until

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
def hosts(fleet: Fleet) -> tuple[Host, Host]:
    return with_fuse(fleet.create()), with_fuse(fleet.create())


def with_fuse(host: Host) -> Host:
    """Create the device on the host, because there is no udev."""
    assert host.run("[ -e /dev/fuse ] || mknod -m 666 /dev/fuse c 10 229").returncode == 0
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


def test_a_read_only_volume_is_read_only_on_every_host(nodes, service):
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


def test_credentials_reach_only_the_service(node, refusing_service):
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
    done = node.mount(data(), env={}, endpoint=refusing_service.url)
    assert refusal(done).startswith("::skyward failed phase=volumes exit=1 command=s3fs weather /data")
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in done.stdout
    assert refusing_service.seen
    assert not any("authorization" in request for request in refusing_service.seen)


def test_a_mount_path_with_files_is_refused(node):
    node.said("mkdir -p /full && touch /full/.file")
    done = node.mount(data(mount_path="/full"))
    assert "exit=1 command=clear /full" in refusal(done)
    assert "/full is not empty" in done.stdout


def test_unmounting_removes_all_mounts_and_can_be_repeated(node):
    """Also busy and broken ones."""
    others = [S3Volume(mount_path=path, bucket="weather") for path in ("/busy", "/dead")]
    assert node.mount(data(), *others).returncode == 0
    assert node.listed() == ["/data", "/busy", "/dead"]
    node.said("cd /busy && (exec setsid sleep 60 >/dev/null 2>&1 &)")
    node.said("pkill -KILL -f 's3fs weather /dead'")
    assert node.unmount().stdout == ""
    assert node.mounts() == []
    node.said("pkill -x sleep")
    wait_until(lambda: not node.daemons(), "s3fs to end")
    assert node.unmount().stdout == ""


@pytest.mark.nightly
def test_a_file_becomes_an_object_that_the_other_host_sees(nodes, service):
    service.fill("results", {})
    one, other = nodes
    for each in nodes:
        assert (
            each.mount(S3Volume(mount_path="/out", bucket="results", prefix="run/1", read_only=False)).returncode == 0
        )
    one.said("mkdir /out/deep && echo -n first > /out/deep/weights && chmod +x /out/deep/weights")
    assert service.objects("results") == {"run/1/deep/weights": "first"}
    assert other.said("cat /out/deep/weights") == "first"
    one.said("echo -n second, longer > /out/deep/weights")
    wait_until(lambda: other.said("stat -c %s /out/deep/weights") == "14", "the size of what was written over")
    assert other.said("cat /out/deep/weights") == "second, longer"
    one.said("rm /out/deep/weights")
    assert service.objects("results") == {}
    wait_until(lambda: other.host.run("cat /out/deep/weights").returncode != 0, "what was removed")


@pytest.mark.nightly
def test_a_user_without_root_mounts_reads_and_writes(node, service):
    service.fill("home", {"given": "theirs"})
    her, home = "setpriv --reuid=1234 --regid=1234 --clear-groups", "/home/she"
    node.directory = f"{home}/instance"
    node.prefix = f"{her} env HOME={home} SKYWARD_INSTANCE_DIRECTORY={node.directory}"
    node.said(
        f"echo she:x:1234:1234::{home}:/bin/sh >> /etc/passwd; mkdir -p {node.directory}; chown -R 1234:1234 {home}"
    )
    done = node.mount(S3Volume(mount_path=f"{home}/bucket", bucket="home", read_only=False))
    assert done.returncode == 0, done.stdout
    script = f"cd {home}/bucket; cat given; echo -n hers > mine; cat mine; stat -c '%u %A' given"
    assert node.said(f'{her} sh -c "{script}"') == "theirshers1234 -rwxr-xr-x"
    assert service.objects("home")["mine"] == "hers"
    assert node.unmount().returncode == 0
    assert node.mounts() == []


METADATA = """
import http.server, json
class Metadata(http.server.BaseHTTPRequestHandler):
    def answer(self):
        roles = "/latest/meta-data/iam/security-credentials/"
        role = {"AccessKeyId": "ASIAROLE", "SecretAccessKey": "rolesecret", "Token": "roletoken", "Expiration": "2099-01-01T00:00:00Z"}
        known = {"/latest/api/token": "tokentoken", roles: "training", roles + "training": json.dumps(role)}
        is_known = self.path == "/latest/api/token" or self.headers.get("X-aws-ec2-metadata-token") == "tokentoken"
        body = known.get(self.path, "").encode() if is_known else b""
        self.send_response(200 if body else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_PUT = answer
    def log_message(self, *args): pass
http.server.HTTPServer(("169.254.169.254", 80), Metadata).serve_forever()
"""


@pytest.mark.nightly
def test_without_keys_the_role_of_the_instance_is_used(node):
    node.said("ip addr add 169.254.169.254/32 dev lo")
    node.host.run(
        "cat > /root/metadata.py; setsid python3 /root/metadata.py >/dev/null 2>&1 & echo $! > /root/metadata.pid",
        text=METADATA,
    )
    try:
        wait_until(
            lambda: node.host.run("ss -ltn | grep -q 169.254.169.254:80").returncode == 0, "the metadata service"
        )
        done = node.mount(data(), env={})
        assert done.returncode == 0, done.stdout
        assert node.said("cat /data/top.txt") == "top"
        node.unmount()
        assert node.mount(data(), env={"AWS_EC2_METADATA_DISABLED": "true"}).returncode == 0
        assert "top" not in node.host.run("cat /data/top.txt").stdout
    finally:
        node.host.run("kill $(pgrep -f metadata.py); ip addr del 169.254.169.254/32 dev lo")


@pytest.mark.nightly
def test_a_bucket_that_does_not_exist_fails_the_phase_with_the_reason(node):
    done = node.mount(data(bucket="no-such-bucket", prefix="datasets"))
    assert re.fullmatch(
        r"::skyward failed phase=volumes exit=1 command=s3fs no-such-bucket:/datasets /data -o \S+", refusal(done)
    )
    assert "bucket or key not found" in done.stdout
    assert node.mounts() == []
    wait_until(lambda: not node.daemons(), "s3fs to end")


@pytest.mark.nightly
def test_a_mount_of_another_user_is_not_changed(node):
    node.said("mkdir -p /data && mount -t tmpfs hers /data && echo hers > /data/file")
    try:
        done = node.mount(data())
        assert refusal(done) == "::skyward failed phase=volumes exit=1 command=clear /data hers"
        assert "/data is taken: hers is mounted there" in done.stdout
        assert node.host.run(f"cat {node.directory}/mounts").stdout == ""
        assert node.unmount().returncode == 0
        assert node.said("cat /data/file") == "hers"
    finally:
        node.said("umount /data")


@pytest.mark.nightly
def test_s3fs_that_cannot_be_installed_fails_the_apt_phase(fleet, service):
    host = with_fuse(fleet.create())
    assert host.run("dpkg --remove s3fs && rm -f /var/cache/apt/archives/*.deb").returncode == 0
    done = Node(host, "/root/instance", service).mount(data())
    assert re.match(r"::skyward failed phase=apt exit=100 command=sudo .*apt-get .*install .*s3fs", refusal(done)), (
        done.stdout
    )
    assert "\nE: " in done.stdout
    host.crash()


@pytest.mark.nightly
def test_an_existing_equal_mount_is_used(node):
    """The same volume again, also for a later instance, starts nothing. A broken one, or another mode, mounts again."""
    assert node.mount(data()).returncode == 0
    (before,) = node.daemons()
    node.directory += "-later"
    for _ in range(2):
        assert node.mount(data()).returncode == 0
    assert node.daemons() == [before]
    assert node.listed() == ["/data"]
    node.said("pkill -KILL -x s3fs")
    wait_until(lambda: node.host.run("ls /data").returncode != 0, "the file system to be dead")
    assert node.mount(data()).returncode == 0
    (before,) = node.daemons()
    for fields, env in (
        ({}, KEYS),
        ({"prefix": "other"}, KEYS),
        ({"prefix": "other"}, {**KEYS, "AWS_ACCESS_KEY_ID": "AKIAOTHER"}),
    ):
        assert node.mount(data(read_only=False, **fields), env=env).returncode == 0
        wait_until(lambda before=before: before not in node.daemons(), "the former s3fs to end")
        (before,) = node.daemons()
    assert node.said("ls /data") == "c.txt"
    assert node.mounts() == node.listed() == ["/data"]


# A script that takes mount-s3's arguments, as its documentation has them (awslabs/mountpoint-s3,
# doc/CONFIGURATION.md), and runs s3fs.
MOUNT_S3 = """#!/bin/bash
echo "$*" >>/root/mount-s3.log
options=fsname=mountpoint-s3,use_path_request_style prefix=
while [[ $1 = --* ]]; do
  case $1 in
    --read-only) options+=,ro ;;
    --prefix) prefix=:/${2%/}; shift ;;
    --endpoint-url) options+=,url=$2; shift ;;
    --region) shift ;;
    --allow-delete | --allow-overwrite | --force-path-style) ;;
    *) echo "unexpected argument $1" >&2; exit 2 ;;
  esac
  shift
done
exec s3fs "$1$prefix" "$2" -o "$options"
"""


@pytest.mark.nightly
def test_mountpoint_s3_is_used_if_the_image_has_it(node, service):
    service.fill("mine", {"in/x": "x"})
    node.host.run("cat > /usr/local/bin/mount-s3; chmod +x /usr/local/bin/mount-s3", text=MOUNT_S3)
    try:
        requested = (
            data(prefix="datasets", region="eu-central-1"),
            S3Volume(mount_path="/out", bucket="mine", read_only=False),
        )
        for _ in range(2):
            done = node.mount(*requested)
            assert done.returncode == 0, done.stdout
        url = service.url
        assert node.said("cat /root/mount-s3.log").split("\n") == [
            f"--read-only --prefix datasets/ --endpoint-url {url} --force-path-style --region eu-central-1 weather /data",
            f"--allow-delete --allow-overwrite --endpoint-url {url} --force-path-style mine /out",
        ]
        assert node.said("cat /data/a.txt /out/in/x") == "ax"
        later = Node(node.host, f"{node.directory}-later", service)
        assert "command=clear /data mountpoint-s3" in refusal(later.mount(*requested))
        done = Node(node.host, node.directory, service).mount(S3Volume(mount_path="/none", bucket="no-such-bucket"))
        assert "command=mount_s3 --read-only" in refusal(done)
    finally:
        node.host.run("rm /usr/local/bin/mount-s3 /root/mount-s3.log")
