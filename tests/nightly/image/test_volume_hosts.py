"""Volumes on real hosts, with a real S3 protocol (moto's server): mounts, refusals, reports and unmounts."""

import re

from skyward_core.image.volume import S3Volume
from tests.conftest import wait_until
from tests.system.image.test_volume_hosts import (  # noqa: F401 - fixtures
    KEYS,
    Node,
    data,
    fleet,
    hosts,
    node,
    nodes,
    refusal,
    service,
    with_fuse,
)


def test_a_file_becomes_an_object_that_the_other_host_sees(nodes, service):
    """It is below the prefix, even without earlier keys. The other host sees new contents and removals too."""
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


def test_several_volumes_can_be_mounted(node, service):
    """A read-only volume and a writable one, of two buckets; the list has both, in the given order."""
    service.fill("side", {})
    done = node.mount(data(), S3Volume(mount_path="/srv/it's out", bucket="side", read_only=False))
    assert done.returncode == 0, done.stdout
    assert node.listed() == ["/data", "/srv/it's out"]
    node.said('cat /data/top.txt > "/srv/it\'s out/copy"')
    assert service.objects("side") == {"copy": "top"}
    assert node.host.run("touch /data/x").returncode != 0


def test_a_user_without_root_mounts_reads_and_writes(node, service):
    """The mount point is in the user's own folder."""
    service.fill("home", {"given": "theirs"})
    node.prefix = "setpriv --reuid=1234 --regid=1234 --clear-groups env HOME=/home/she SKYWARD_INSTANCE_DIRECTORY=/home/she/instance"
    node.directory = "/home/she/instance"
    node.said(
        "echo she:x:1234:1234::/home/she:/bin/sh >> /etc/passwd; mkdir -p /home/she/instance && chown -R 1234:1234 /home/she"
    )
    done = node.mount(S3Volume(mount_path="/home/she/bucket", bucket="home", read_only=False))
    assert done.returncode == 0, done.stdout
    as_her = "setpriv --reuid=1234 --regid=1234 --clear-groups"
    assert (
        node.said(
            f"{as_her} sh -c 'cat /home/she/bucket/given; echo -n hers > /home/she/bucket/mine; cat /home/she/bucket/mine'"
        )
        == "theirshers"
    )
    assert node.said(f"{as_her} stat -c '%u %A' /home/she/bucket/given") == "1234 -rwxr-xr-x"
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


def test_without_keys_the_role_of_the_instance_is_used(node):
    """If the metadata service (IMDSv2) names a role, its credentials sign the requests.

    So a private object is readable.
    """
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


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_that_does_not_exist_fails_the_phase_with_the_reason(node):
    """The report has the command, its exit code and the message of s3fs. No mount and no process is left."""
    done = node.mount(data(bucket="no-such-bucket", prefix="datasets"))
    assert re.fullmatch(
        r"::skyward failed phase=volumes exit=1 command=s3fs no-such-bucket:/datasets /data -o \S+", refusal(done)
    )
    assert "bucket or key not found" in done.stdout
    assert node.mounts() == []
    wait_until(lambda: not node.daemons(), "s3fs to end")


def test_a_closed_port_fails_the_phase(node, fleet):
    """It fails within seconds."""
    done = node.mount(data(), endpoint=f"http://{fleet.network.gateway}:9")
    assert "command=s3fs weather /data" in refusal(done)
    assert node.mounts() == []


def test_a_mount_of_another_user_is_not_changed(node):
    """Its path is refused, never listed, and not unmounted at the end."""
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


def test_s3fs_that_cannot_be_installed_fails_the_apt_phase(fleet, service):
    """A host without s3fs and without packages fails in the phase apt, with apt's own message."""
    host = with_fuse(fleet.create())
    assert host.run("dpkg --remove s3fs && rm -f /var/cache/apt/archives/*.deb").returncode == 0
    done = Node(host, "/root/instance", service).mount(data())
    assert re.match(r"::skyward failed phase=apt exit=100 command=sudo .*apt-get .*install .*s3fs", refusal(done)), (
        done.stdout
    )
    assert "\nE: " in done.stdout
    host.crash()


# ── repeated mounts, and unmounts ────────────────────────────────────────────────────────────────────────────────────


def test_an_existing_equal_mount_is_used(node):
    """The same volume again, also for a later instance, starts nothing. Another mode, prefix or key mounts again."""
    assert node.mount(data()).returncode == 0
    (first,) = node.daemons()
    node.directory += "-later"
    assert node.mount(data()).returncode == 0
    assert node.mount(data()).returncode == 0
    assert node.daemons() == [first]
    assert node.listed() == ["/data"]
    before = first
    for requested, env in (
        (data(read_only=False), KEYS),
        (data(read_only=False, prefix="other"), KEYS),
        (data(read_only=False, prefix="other"), {**KEYS, "AWS_ACCESS_KEY_ID": "AKIAOTHER"}),
    ):
        assert node.mount(requested, env=env).returncode == 0
        wait_until(lambda before=before: before not in node.daemons(), "the former s3fs to end")
        (before,) = node.daemons()
    assert node.said("ls /data") == "c.txt"
    assert node.mounts() == ["/data"]
    assert node.listed() == ["/data"]


def test_a_broken_mount_is_mounted_again(node):
    """The path of the broken file system is unmounted first."""
    assert node.mount(data()).returncode == 0
    node.said("pkill -KILL -x s3fs")
    wait_until(lambda: node.host.run("ls /data").returncode != 0, "the file system to be dead")
    assert node.mount(data()).returncode == 0
    assert node.said("cat /data/top.txt") == "top"


# ── mountpoint-s3 ────────────────────────────────────────────────────────────────────────────────────────────────────

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


def test_mountpoint_s3_is_used_if_the_image_has_it(node, service):
    """`mount-s3` is preferred to s3fs, with its own options.

    The same instance uses its mount again; for another instance it is a foreign mount.
    """
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
