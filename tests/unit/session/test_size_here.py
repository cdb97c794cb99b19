"""Which process may set the number of nodes, and what the others get as an error."""

from types import SimpleNamespace
from typing import Any, override

import pytest

import skyward_core as sky
from skyward_core.machines.owner import Owner
from skyward_core.session.attached import Attached
from skyward_core.session.named_session import NamedSession
from skyward_core.session.pool_size import PoolSize
from skyward_core.session.size_here import size_here

SIZE: Any = object()
KEEPER = Owner("ann", "desk", "boot", "1", 42, "7")


class Opener(NamedSession):
    """The process that has rented a pool with a name; it may have stepped down."""

    def __init__(self, *, is_steward: bool) -> None:
        self.size = SIZE
        self.keeps = is_steward

    @property
    @override
    def is_steward(self) -> bool:
        return self.keeps


class Joined(Attached):
    """A process that has attached."""

    def __init__(self) -> None:
        """Attach to nothing."""


def use_of(steward: Owner | None = KEEPER, *, size: Any = None, error: Exception | None = None) -> Any:
    """Return a process as a client of the name; `size` is that of its stewardship."""

    def find() -> Owner | None:
        if error is not None:
            raise error
        return steward

    return SimpleNamespace(name="nightly", steward=find, succession=SimpleNamespace(size=size))


def test_the_process_that_keeps_the_pool_may_set_its_size() -> None:
    """Also one that has taken the pool over."""
    assert size_here(Opener(is_steward=True), use_of(None)) is SIZE
    assert size_here(Joined(), use_of(None, size=SIZE)) is SIZE


@pytest.mark.parametrize("opened", [Opener(is_steward=False), Joined()], ids=["stepped down", "joined"])
def test_any_other_process_learns_which_one_may(opened: Any) -> None:
    with pytest.raises(sky.BadRequest, match=r"process 42 of ann@desk keeps the pool 'nightly'.*call scale\(\) there"):
        size_here(opened, use_of())
    with pytest.raises(sky.BadRequest, match=r"a process of ann@desk keeps"):
        size_here(opened, use_of(Owner.unknown("ann@desk")))
    for use in (use_of(None), use_of(error=sky.LedgerError("away"))):
        with pytest.raises(sky.BadRequest, match="cannot see which one does"):
            size_here(opened, use)


def test_an_attached_process_without_a_name_may_not() -> None:
    with pytest.raises(sky.BadRequest, match="only the process that has opened the pool"):
        size_here(Joined(), None)


def test_a_process_that_keeps_the_pool_no_more_does_not_wait_for_nodes() -> None:
    spec = sky.PoolSpec.of(provider=sky.Local(), nodes=(1, 3))
    wanted: list[int | None] = []
    recovery: Any = SimpleNamespace(is_stopped=True, fix_size=wanted.append)
    cluster: Any = SimpleNamespace(draining=SimpleNamespace(size=1))
    with pytest.raises(sky.BadRequest, match="another process keeps it now"):
        PoolSize(spec, cluster, recovery, lambda: False).scale(3, 3600.0)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["keeps the pool", "stepped down"])
def test_only_the_process_that_keeps_the_pool_announces_which_ranks_stay(is_stopped: bool) -> None:
    """The clock of a process that has stepped down goes on. It may lack nodes that the new steward has rented."""
    spec = sky.PoolSpec.of(provider=sky.Local(), nodes=(1, 3))
    done: list[str] = []
    recovery: Any = SimpleNamespace(is_stopped=is_stopped, observe=lambda _: done.append("observe"))
    draining = SimpleNamespace(announce=lambda: done.append("announce"), backlog=lambda: 0)
    cluster: Any = SimpleNamespace(draining=draining, is_idle=True)
    PoolSize(spec, cluster, recovery, lambda: False).look()
    assert done == ([] if is_stopped else ["announce", "observe"])
