"""The nodes of a pool by rank: which are dropped, when one is lost, and what is refused where ports are forwarded."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BadRequest, BootstrapFailed, NodeLost, SkywardError, Unreachable
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.provisioning.bootstrap import FirstCause
from skyward_core.provisioning.nodes import Nodes
from skyward_core.provisioning.replacement import HeadRestart


class Node:
    """A node and the transport to it. Its answers are set by a test."""

    def __init__(self, rank: int, *, is_spot: bool) -> None:
        self.instance = Instance(
            id=f"i-{rank}",
            provider="local",
            pool_id="sky-test",
            rank=rank,
            state=InstanceState.RUNNING,
            region="r",
            instance_type="t",
            private_ip=f"10.0.0.{rank}",
            is_spot=is_spot,
        )
        self.transport = self
        self.is_local = False
        self.is_connected = True
        self.value_directories = ("/dev/shm/x",)
        self.answer: bool | SkywardError | None = None
        self.asked: list[Any] = []
        self.error: SkywardError | None = None
        self.notices: tuple[str, ...] = ()

    def follow(self) -> None:
        self.notices = ("notice",)
        if self.error is not None:
            raise self.error

    def lives(self, seconds: float) -> bool | None:
        self.asked.append(seconds)
        if isinstance(self.answer, SkywardError):
            raise self.answer
        return self.answer

    def extend_lease(self, seconds: float) -> None:
        self.asked.append(seconds)

    def send_settings(self, settings: object) -> None:
        raise Unreachable("it does not answer")

    def failure(self, words: str) -> BootstrapFailed:
        return BootstrapFailed(words)


class Pool:
    """Nodes 0 and 2 of a pool whose provider lists the machines `listed`."""

    def __init__(self, *, is_local: bool = False, is_spot: bool = False) -> None:
        self.listed: set[str] | Exception = {"i-0", "i-2"}
        self.ended: list[Any] = []
        self.rental: Any = SimpleNamespace(
            provider=SimpleNamespace(is_local=is_local, notice_url="http://notice", simulates=False),
            living=self._living,
            accelerator_of=lambda machine: None,
            spec=sky.PoolSpec(),
            end=self.ended.append,
        )
        certificate: Future[Any] = Future()
        certificate.set_result(SimpleNamespace(certificate="cert", key="key"))
        spec = sky.PoolSpec.of(provider=sky.Local(), nodes=3)
        self.nodes = Nodes(spec, "sky-test", self.rental, certificate, lambda event: None)
        self.head, self.other = (Node(rank, is_spot=is_spot) for rank in (0, 2))
        all_of_them: Any = {2: self.other, 0: self.head}
        self.nodes.all = all_of_them

    def _living(self) -> set[str]:
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed


def test_a_node_dropped_by_a_failed_replacement_does_not_fail_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart sends the new head's address to all nodes; meanwhile the replacement of one drops and ends it."""
    pool = Pool()
    node: Any = pool.other
    monkeypatch.setattr(pool.nodes, "settings", lambda *_: pool.nodes.all.clear())
    restart = HeadRestart.__new__(HeadRestart)
    vars(restart).update(_nodes=pool.nodes, _rental=pool.rental)
    restart._send_or_drop(2, node)
    assert pool.ended == []


def test_a_pool_without_a_head_says_so() -> None:
    """Its head was lost, and another one could not be rented, as when a sweep has condemned the pool."""
    pool = Pool()
    node: Any = pool.other
    del pool.nodes.all[0]
    with pytest.raises(NodeLost, match="has no head"):
        _ = pool.nodes.scheduler_from_here
    with pytest.raises(NodeLost, match="has no head"):
        pool.nodes.settings(node, 2, "tls://10.0.0.1:8786")


def test_a_pool_whose_nodes_cannot_reach_each_other_cannot_be_detached() -> None:
    """They listen on loopback, each at its own ports: one for a scheduler and one for each worker."""
    pool = Pool()
    node: Any = pool.other
    assert pool.nodes.settings(node, 2, None).host == "10.0.0.2"
    pool.nodes.forwarding.choose()
    settings = pool.nodes.settings(node, 2, None)
    assert (settings.host, settings.head_host) == ("127.0.0.1", "127.0.0.1")
    assert (settings.scheduler_port, *settings.worker_ports) == pool.nodes.forwarding.ports_of(2)
    assert len(settings.worker_ports) == 1
    with pytest.raises(BadRequest, match="cannot be detached"):
        pool.nodes.extend_leases(60)
    assert pool.head.asked == []


def test_only_spot_machines_may_be_taken_back() -> None:
    """The notices of others are not read. A node that has failed keeps those that it has."""
    pool = Pool()
    node: Any = pool.other
    assert (pool.nodes.notices(2), pool.nodes.notice_url(node)) == ((), "")
    pool = Pool(is_spot=True)
    node = pool.other
    assert pool.nodes.notice_url(node) == "http://notice"
    pool.other.error = BootstrapFailed("over")
    assert (pool.nodes.notices(2), pool.nodes.notices(1)) == (("notice",), ())


@pytest.mark.parametrize(
    ("is_local", "is_connected", "listed", "is_lost"),
    [
        (False, True, set[str](), False),
        (False, False, set[str](), True),
        (False, False, {"i-2"}, False),
        (False, False, ConnectionError("down"), False),
        (True, True, set[str](), True),
    ],
)
def test_a_machine_is_lost_only_if_a_listing_lacks_it(
    is_local: bool, is_connected: bool, listed: set[str] | Exception, is_lost: bool
) -> None:
    """One that answers is not looked for, and an outage of the provider proves nothing."""
    pool = Pool(is_local=is_local)
    node: Any = pool.other
    pool.listed, node.is_connected = listed, is_connected
    if not is_lost:
        pool.nodes.raise_if_lost(node)
        return
    with pytest.raises(BootstrapFailed, match="its machine is gone"):
        pool.nodes.raise_if_lost(node)


def test_the_error_of_a_command_has_no_secrets_of_the_environment() -> None:
    """Those of the image's `env` and of the pool's, in the last lines and in the command itself."""
    lines = [
        "asked with t0k-image and pa55-pool for weights",
        "::skyward failed phase=shell exit=9 command=get t0k-image",
    ]
    transport = SimpleNamespace(
        instance=Instance.model_construct(id="i-1"), new_lines=lambda: ["::skyward phase shell", *lines]
    )
    env, image = {"DB_PASSWORD": "pa55-pool"}, sky.Image(env={"HUB_TOKEN": "t0k-image", "NAME": "weights"})
    spec = sky.PoolSpec.of(provider=sky.Local(), image=image, env=env)
    rental: Any = SimpleNamespace(transports=SimpleNamespace(to=lambda _: transport))
    node = Nodes(spec, "sky-test", rental, Future(), lambda _: None).preparation_of(transport.instance, 1)
    with pytest.raises(BootstrapFailed, match=r"phase shell: phase=shell exit=9 command=get \*\*\*") as caught:
        node.follow()
    assert (caught.value.exit_code, caught.value.output[-1]) == (9, "asked with *** and *** for weights")
    assert "t0k-image" not in str(caught.value)


EARLIER = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
ValueError: an earlier one
goes on"""
CHAIN = """Traceback (most recent call last):
  File "socket.py", line 1, in bind
OSError: [Errno 98] Address already in use

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "scheduler.py", line 2, in start
RuntimeError: Scheduler failed to start.

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "node.py", line 3, in main
SystemExit: 1"""


def test_the_error_of_a_server_that_does_not_start_names_the_first_cause() -> None:
    """Python prints it before what it has caused, so that the last lines may lack it."""
    many = [f"  File {number}.py" for number in range(40)]
    begun, *rest = CHAIN.splitlines()[-3:]
    lines = ["::skyward phase server", *EARLIER.splitlines(), *CHAIN.splitlines()[:-3], begun, *many, *rest]
    transport = SimpleNamespace(
        instance=Instance.model_construct(id="i-1"), new_lines=lambda: [*lines, "::skyward exited 1"]
    )
    rental: Any = SimpleNamespace(transports=SimpleNamespace(to=lambda _: transport))
    spec = sky.PoolSpec.of(provider=sky.Local())
    node = Nodes(spec, "sky-test", rental, Future(), lambda _: None).preparation_of(transport.instance, 1)
    with pytest.raises(
        BootstrapFailed,
        match=r"phase server: exit=1; the first error was OSError: \[Errno 98\] Address already in use\n",
    ):
        node.follow()


def test_a_log_without_a_traceback_has_no_first_cause() -> None:
    cause = FirstCause()
    for line in ("error: no such file", "During handling of the above exception, another exception occurred:"):
        cause.feed(line)
    assert cause.text == ""
    for line in EARLIER.splitlines():
        cause.feed(line)
    assert cause.text == "ValueError: an earlier one"
