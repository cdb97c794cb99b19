"""Sealed texts: only the same keys and the same context open them, and an altered one is refused."""

import base64
import secrets
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.machines import signing as sealing
from skyward_core.machines.signing import KeyRing

CONTENT = b"a key."
"""34 bytes when sealed, so that base64 has unused bits at its end."""
CONTEXT = b"pool and lease"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skyward"


def new_key() -> str:
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()


def test_only_the_same_context_opens_a_sealed_text() -> None:
    """The same content gives another text each time, and the text does not contain it."""
    ring = KeyRing([b"k" * 32])
    sealed = ring.seal(CONTENT, CONTEXT)
    assert ring.unseal(sealed, CONTEXT) == CONTENT
    assert ring.seal(CONTENT, CONTEXT) != sealed
    assert CONTENT not in base64.b64decode(sealed.rpartition(":")[2])
    with pytest.raises(sky.LeaseTampered, match="another pool"):
        ring.unseal(sealed, b"another pool and lease")


def test_the_first_key_seals_and_all_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a key is replaced without a gap: a new one is put in front, and later the old one is taken away."""
    old, new = new_key(), new_key()
    monkeypatch.setenv("SKYWARD_SECRET_KEY", old)
    sealed = KeyRing.to_seal().seal(CONTENT, CONTEXT)
    monkeypatch.setenv("SKYWARD_SECRET_KEY", f"{new}, {old}")
    assert KeyRing.to_open().unseal(sealed, CONTEXT) == CONTENT
    sealed_again = KeyRing.to_seal().seal(CONTENT, CONTEXT)
    monkeypatch.setenv("SKYWARD_SECRET_KEY", new)
    assert KeyRing.to_open().unseal(sealed_again, CONTEXT) == CONTENT
    with pytest.raises(sky.CredentialsError, match=r"another key.*SKYWARD_SECRET_KEY") as caught:
        KeyRing.to_open().unseal(sealed, CONTEXT)
    assert not isinstance(caught.value, sky.LeaseTampered)


@pytest.mark.parametrize("form", [base64.b64encode, base64.urlsafe_b64encode])
def test_keys_are_those_of_openssl_and_of_fernet(monkeypatch: pytest.MonkeyPatch, form: object) -> None:
    """Both alphabets of base64 are accepted, for the same key."""
    key = b"\xff\xfe" * 16
    monkeypatch.setenv("SKYWARD_SECRET_KEY", form(key).decode())  # type: ignore[operator]
    assert sealing.secret_keys() == [key]


@pytest.mark.parametrize("bad", ["short", "", "x" * 44, base64.b64encode(b"k" * 31).decode(), "é" * 44])
def test_a_malformed_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    """The message says which one it is, and how to make a key."""
    good = new_key()
    monkeypatch.setenv("SKYWARD_SECRET_KEY", f"{good},{bad}")
    for use in (KeyRing.to_seal, KeyRing.to_open):
        with pytest.raises(
            sky.BadRequest, match="key 2 is not 32 bytes in base64: `openssl rand -base64 32`"
        ) as caught:
            use()
        assert good not in str(caught.value)
        assert not bad or bad not in str(caught.value)


def test_without_the_variable_the_key_is_a_private_file(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the file learns what both processes need. A file opens also after the variable was set."""
    with pytest.raises(
        sky.CredentialsError,
        match=r"SKYWARD_SECRET_KEY is not set.*secret\.key.*only this machine, and others with the",
    ):
        KeyRing.to_open()
    assert not state.exists()
    sealed = KeyRing.to_seal().seal(CONTENT, CONTEXT)
    assert (state / "secret.key").stat().st_mode & 0o777 == 0o600
    assert KeyRing.to_open().unseal(sealed, CONTEXT) == CONTENT
    monkeypatch.setenv("SKYWARD_SECRET_KEY", new_key())
    assert KeyRing.to_open().unseal(sealed, CONTEXT) == CONTENT
    (state / "secret.key").chmod(0o644)
    with pytest.raises(sky.CredentialsError, match="another key"):
        KeyRing.to_open().unseal(sealed, CONTEXT)


def test_a_ring_does_not_show_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows eight characters that tell keys apart."""
    key = new_key()
    monkeypatch.setenv("SKYWARD_SECRET_KEY", key)
    shown = repr(KeyRing.to_seal())
    assert shown.startswith("KeyRing(")
    assert key not in shown
    assert repr(base64.urlsafe_b64decode(key)) not in shown
