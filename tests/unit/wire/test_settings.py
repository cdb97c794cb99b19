"""What another client takes from the settings of a node."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.wire.checks import Unreadable
from skyward_core.wire.settings import SeenSettings
from tests.unit.wire.test_reports import anything, refused

SETTINGS: dict[str, Any] = {
    "pool_id": "sky-1",
    "instance_id": "i-0",
    "tls_certificate": "-----BEGIN CERTIFICATE-----",
    "tls_key": "-----BEGIN PRIVATE KEY-----",
    "generation": 2,
    "head_port": 8786,
    "scheduler_port": 0,
    "workers": [],
}


def test_the_settings_of_a_node_are_read() -> None:
    seen = SeenSettings.of(json.dumps(SETTINGS))
    assert (seen.pool_id, seen.generation, seen.head_port) == ("sky-1", 2, 8786)


@pytest.mark.parametrize(
    "changes",
    [
        {"tls_certificate": "/root/.ssh/id_ed25519"},
        {"tls_key": ""},
        {"tls_key": None},
        {"head_port": 70_000},
        {"head_port": "8786"},
        {"generation": -1},
        {"pool_id": 7},
    ],
)
def test_settings_that_lie_are_refused(changes: dict[str, Any]) -> None:
    """A path in the place of a key would be opened here."""
    with pytest.raises(Unreadable):
        SeenSettings.of(json.dumps(SETTINGS | changes))


@given(st.text() | anything.filter(lambda value: not isinstance(value, bytes)).map(repr))
def test_any_other_text_is_refused(text: str) -> None:
    for garbage in (text, "[" * 100_000, "", "[]", "{}"):
        with refused():
            SeenSettings.of(garbage)
