"""Our SSH key, and the host keys that are derived from it.

The key is created once, is secret, and is the same in every process.
"""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import asyncssh
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from skyward_core.errors import BadRequest
from skyward_core.providers.userdata import host_key, our_key

LAUNCH = "L0a1b2c3d4e5f607182930415263748596"
CLIENT = """\
import json, sys
from skyward_core.providers.userdata import host_key, our_key
sys.stdin.read(1)
key = our_key()
print(json.dumps([str(key.path), key.public, host_key("L1", key).public]))
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the state directory of this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def keygen(path: Path, *words: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-C", "jo@box", "-f", str(path), *words], check=True)
    return path


def public_of(path: Path) -> str:
    return subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", str(path)], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_our_key_is_created_once_and_only_the_user_can_read_it(home: Path) -> None:
    """It is an Ed25519 key in a private folder below the state directory. OpenSSH and asyncssh can read it."""
    key = our_key()
    assert key.path == home / "skyward/ssh/id_ed25519"
    assert (stat.S_IMODE(key.path.stat().st_mode), stat.S_IMODE(key.path.parent.stat().st_mode)) == (0o600, 0o700)
    assert [path.name for path in key.path.parent.iterdir()] == ["id_ed25519"]
    assert key.public == public_of(key.path)
    assert asyncssh.read_private_key(key.path).export_public_key().decode().split() == key.public.split()
    before = key.path.read_bytes()
    assert our_key() == key
    assert key.path.read_bytes() == before


def test_its_mode_does_not_depend_on_the_umask(home: Path) -> None:
    """No other user can read it, even if new files are readable for all users."""
    old = os.umask(0)
    try:
        key = our_key()
    finally:
        os.umask(old)
    assert (stat.S_IMODE(key.path.stat().st_mode), stat.S_IMODE(key.path.parent.stat().st_mode)) == (0o600, 0o700)


def test_processes_that_start_at_the_same_time_get_the_same_key(home: Path) -> None:
    """One of them creates it. None reads an incomplete key, and no other file is left in the folder."""
    clients = [
        subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("g")
        client.stdin.close()
    answers = []
    for client in clients:
        assert client.stdout is not None
        answers.append(json.loads(client.stdout.read()))
        client.stdout.close()
        assert client.wait(30) == 0
    assert [answer == answers[0] for answer in answers] == [True] * 4
    assert [path.name for path in (home / "skyward/ssh").iterdir()] == ["id_ed25519"]
    key = our_key()
    assert answers[0] == [str(key.path), key.public, host_key("L1", key).public]


@pytest.mark.parametrize("content", [b"", b"no key at all", b"\xff\xfe\x00", None])
def test_a_damaged_key_is_an_error_and_is_not_replaced(home: Path, content: bytes | None) -> None:
    """BadRequest has its path, also for an incomplete key. Running machines may accept no other key."""
    place = our_key().path
    content = place.read_bytes()[:150] if content is None else content
    place.write_bytes(content)
    with pytest.raises(BadRequest, match="id_ed25519 is no OpenSSH private key"):
        our_key()
    assert place.read_bytes() == content


@pytest.mark.parametrize(
    "words",
    [("-t", "ed25519"), ("-t", "rsa", "-b", "2048"), ("-t", "ecdsa", "-b", "256"), ("-t", "ecdsa", "-b", "521")],
)
def test_a_configured_key_is_used(tmp_path: Path, home: Path, words: tuple[str, ...]) -> None:
    """It may have any type. Its comment is not sent, and no file is written. Host keys are derived from it too."""
    path = keygen(tmp_path / "mine", *words, "-N", "")
    key = our_key(str(path))
    assert key.path == path
    assert key.public == " ".join(path.with_suffix(".pub").read_text().split()[:2])
    assert host_key(LAUNCH, key) == host_key(LAUNCH, our_key(str(path)))
    assert host_key(LAUNCH, key).public.startswith("ssh-ed25519 ")
    assert not home.exists()


def test_the_path_of_a_key_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be relative or begin with `~`. A lease has the path, and is read elsewhere."""
    keygen(tmp_path / "mine", "-t", "ed25519", "-N", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert our_key("~/mine").path == our_key("mine").path == our_key("./mine").path == tmp_path / "mine"


def test_an_unusable_key_is_a_bad_request(tmp_path: Path) -> None:
    """It has a passphrase, is a public key, or has another format."""
    keygen(tmp_path / "locked", "-t", "ed25519", "-N", "hunter2")
    keygen(tmp_path / "pem", "-t", "rsa", "-b", "2048", "-m", "PEM", "-N", "")
    for name, why in {
        "locked": "without passphrase",
        "locked.pub": "is no OpenSSH private key",
        "pem": "is no OpenSSH private key",
        ".": "cannot be read",
        "none": "cannot be read",
    }.items():
        with pytest.raises(BadRequest, match=why) as caught:
            our_key(str(tmp_path / name))
        assert "hunter2" not in str(caught.value)
    with pytest.raises(BadRequest, match="cannot be expanded"):
        our_key("~nobody-is-called-so/id")
    assert not (tmp_path / "none").exists()


def test_a_host_key_depends_on_launch_and_user_key(tmp_path: Path) -> None:
    """It is the same each time, and differs for every other launch and for every other key of the user."""
    ours, others = our_key(), our_key(str(keygen(tmp_path / "mine", "-t", "ed25519", "-N", "")))
    keys = [host_key(launch, key).public for launch in (LAUNCH, LAUNCH[:-1], "", "Lé") for key in (ours, others)]
    assert len(set(keys)) == len(keys)
    assert host_key(LAUNCH, ours).public == keys[0]
    assert ours.public not in keys


def test_openssh_and_asyncssh_accept_a_host_key(tmp_path: Path) -> None:
    """They read the private part and derive the same public part. It has neither passphrase nor comment."""
    key = host_key(LAUNCH, our_key())
    path = tmp_path / "ssh_host_ed25519_key"
    path.write_text(key.private)
    path.chmod(0o600)
    assert key.private.endswith("-----END OPENSSH PRIVATE KEY-----\n")
    assert public_of(path) == key.public
    assert asyncssh.import_private_key(key.private).export_public_key().decode().split() == key.public.split()


def test_the_private_part_of_a_host_key_is_in_no_repr() -> None:
    """It is not in the repr of an object that contains it."""
    key = host_key(LAUNCH, our_key())
    lines = key.private.splitlines()
    for text in (repr(key), str(key), f"{key}", repr([key]), repr({"host": key})):
        assert key.public in text
        assert not [line for line in lines if line in text]


def test_all_versions_derive_the_same_host_key(tmp_path: Path) -> None:
    """A process that attaches may have other versions than the one that launched: no library's format matters."""
    for private, expected in (
        (
            ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))),
            "IPvxYeDqk5HWYpGVVw3Pyb8y7q62jdeWskIr1aINaHBg",
        ),
        (ec.derive_private_key(4711, ec.SECP256R1()), "IC/3FEm/j9ugB/sppQUuWWGq7gRAVzxCor/V+6QKodAS"),
    ):
        form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        (tmp_path / "fixed").write_bytes(private.private_bytes(*form))
        assert (
            host_key("L1", our_key(str(tmp_path / "fixed"))).public == f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA{expected}"
        )
