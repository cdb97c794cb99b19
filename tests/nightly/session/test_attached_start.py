"""What an attachment that fails says: that the pool is gone, or that it does not answer just now."""

import pytest

from skyward_core.errors import CommandFailed, CommandTimedOut, NodeLost, Unreachable
from tests.system.session.test_attached_start import (  # noqa: F401 - fixtures
    World,
    attach,
    world,
)


@pytest.mark.parametrize(
    ("unread", "error"),
    [
        (FileNotFoundError(2, "no such file"), NodeLost),
        (CommandFailed("cat: no such file"), NodeLost),
        (CommandTimedOut("no answer within 30 s"), Unreachable),
        (OSError(24, "Too many open files"), Unreachable),
    ],
)
def test_a_head_that_cannot_be_asked_is_not_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, unread: Exception, error: type[Exception]
) -> None:
    """A missing file says that it has ended; a lack of time or of files on this side says nothing."""
    world.unread = unread
    with pytest.raises(error):
        attach(world, monkeypatch)
    assert world.connected == 0
