"""This machine as a provider: an instance is a set of processes in its own session, with a directory and a log.

It is the default, used by the quick start and most tests. Its state is the process table. An instance is every process
that was started with its tag in the environment (`worker.node_clocks`), and all processes below one of these. Any
process of the same user finds it, without a file. Two mechanisms keep processes visible that have removed the tag: the
keeper, above all of them (`worker.keeper`), and where the host allows it a control group (`ControlGroup`).
docs/decisions/0011 has the states.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Self

import psutil
from pydantic import AfterValidator, BeforeValidator, Field

from skyward_core.accelerators import Accelerator, parse
from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import BadRequest, InstancesLeft
from skyward_core.machines.instances import Instance, InstanceState, NodeEnd, node_end
from skyward_core.machines.offers import ARCHITECTURES, MOST_USD_PER_HOUR, Offer, Requirements
from skyward_core.machines.owner import Owner, OwnerState, boot_id
from skyward_core.paths import existing, first_private, state_places
from skyward_core.providers.base import POOL_TAG, RANK_TAG, Provider, Tags
from skyward_core.providers.tagging import TAGS_VARIABLE, from_word, of_machine, price_in, rank_in, to_word
from skyward_core.providers.termination_shell import PROOFS
from skyward_core.secret import looks_secret
from skyward_core.shown_text import visible_logger
from skyward_core.wire.private_folders import NotPrivate, is_private
from skyward_core.wire.settings import memory_directory, this_process
from skyward_core.worker import call_groups, keeper
from skyward_core.worker.metrics import VISIBLE, gpus_here
from skyward_core.worker.node_clocks import INSTANCE_TAG, kill_instance, members, tagged_processes, uptime
from skyward_core.worker.node_clocks import POOL_TAG as POOL_VARIABLE

NODES, ENDS = "nodes", "ended"
MOST_ENDS = 2000
LAUNCHED_BY = "launched-by"
ID_SHAPE = re.compile(r"local-[0-9a-f]{12}")
ABANDONED_SECONDS = 86_400.0
"""An empty folder without its launcher's name is abandoned when it is older. A newer one may get the name yet."""
NAME_SHAPE = re.compile(
    r"skyward\.(?P<instance>local-[0-9a-f]{12})\.(?P<pool>[A-Za-z0-9_-]{1,120})\.(?P<rank>[0-9]{1,6})"
)
LIMITS = ("memory.max", "memory.high", "pids.max", "cpu.max", "cpuset.cpus", "io.max")
NO_LIMIT = ("", "max", "max 100000")
ABANDONED_GROUP_SECONDS = 60.0
"""An empty group that is older belongs to a node that has ended. A newer one may soon get its first process."""
GB = 1e9
NODE_BYTES = 100_000_000
"""The least memory of a node: supervisor, scheduler or worker, and a runner for each slot."""
FEW_NODES = 16
"""As many may always be tried."""
TERM_SECONDS = 1.0
KILL_SECONDS = 10.0
RANK_VARIABLE = "SKYWARD_RANK"
PRICE_VARIABLE = "SKYWARD_PRICE_PER_HOUR"
SPOT_VARIABLE = "SKYWARD_IS_SPOT"
DIRECTORY_VARIABLE = "SKYWARD_INSTANCE_DIRECTORY"
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_DEVICE_ORDER",
    VISIBLE,
)
KEPT_PREFIXES = ("LC_", "NVIDIA_", "SSL_CERT_", "UV_", "PIP_", "XDG_")
KEPT_ENDINGS = ("_CA_BUNDLE", "_proxy", "_PROXY")
INSTALLER_PREFIXES, PROXY_ENDINGS = ("UV_", "PIP_"), ("_proxy", "_PROXY")
WITH_USER = re.compile(r"(^|://)[^\s/@]+@")
"""The address of an index or a proxy that contains a user, and mostly a password."""
LOGIN_NAME = re.compile(r"USERNAME|PASSWORD|TOKEN|CREDENTIAL")
_log = visible_logger("skyward")


# The folders of this machine's nodes, one on disk and one in memory for each, and which of them no node needs.
#
# A folder has its launcher's process in the file `launched-by`. It is written before the node's first process starts.
# States, and who removes the folder:
#
#     made, and its launcher lives           the launcher, if the start fails
#     a process of the node lives            `Local.terminate`, or the keeper, if the launcher is gone
#     no process, and the launcher is dead   the next sweep (`abandoned`): both were killed, or it was before the start
#
# When a node has ended, its keeper writes when and why into a file with its id, in the folder `ended` beside `nodes`.
# It stays, because the ledger may learn of the end much later. The oldest are removed when there are too many.


def make_folders(instance_id: str) -> Path:
    """Create the folders of an instance, on disk and in memory, before another process can know its id.

    Raises BadRequest if no folder is safe.
    """
    try:
        directory = first_private(NODES, state_places(), is_locked=True) / instance_id
    except NotPrivate as error:
        raise BadRequest(f"nodes of this machine need a separate folder: {error}") from error
    directory.mkdir(mode=0o700)
    with contextlib.suppress(OSError):  # then the cost of a node whose end no process sees is estimated
        end_file(directory).parent.mkdir(mode=0o700, exist_ok=True)
        _forget_old_ends(end_file(directory).parent)
    here = Owner.here()
    (directory / LAUNCHED_BY).write_text(f"{here.name}\n{here.process}\n")
    with contextlib.suppress(OSError):  # large values go into the other folder
        os.mkdir(memory_directory(instance_id), 0o700)
    return directory


def remove_folders(instance_id: str, directory: Path) -> None:
    """Remove the folders of an instance. In another user's folder nothing is ours."""
    shutil.rmtree(memory_directory(instance_id), ignore_errors=True)
    if is_private(directory.parent):
        shutil.rmtree(directory, ignore_errors=True)


def end_file(directory: Path) -> Path:
    """Return the file in which the keeper of a node with this folder writes when and why the node has ended."""
    return directory.parent.parent / ENDS / directory.name


def ends_of(instance_ids: Iterable[str], now: datetime) -> dict[str, NodeEnd]:
    """Return when and why nodes of this user have ended, by id; those that have left no file are absent."""
    found: dict[str, NodeEnd] = {}
    boot, up = boot_id(), uptime()
    for folder in existing(ENDS, state_places()):
        if not is_private(folder):
            continue
        for instance_id in instance_ids:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = (folder / instance_id).read_text() if ID_SHAPE.fullmatch(instance_id) else ""
                if (end := node_end(text, now=now, uptime=up, boot=boot)) is not None:
                    found[instance_id] = end
    return found


def _forget_old_ends(folder: Path) -> None:
    with os.scandir(folder) as entries:
        files = list(entries)
    if len(files) > MOST_ENDS:
        for entry in sorted(files, key=lambda entry: entry.stat().st_mtime)[: len(files) - MOST_ENDS // 2]:
            with contextlib.suppress(OSError):  # another process removes it
                os.unlink(entry.path)


def abandoned(has_processes: Callable[[str], bool]) -> list[Path]:
    """Return the folders on disk of nodes that have ended and whose launchers are dead.

    `has_processes` returns whether any process of an instance lives. A folder whose launcher is not visible from here
    is left: another container, or another computer with the same home, may have it.
    """
    return [
        directory
        for nodes in existing(NODES, state_places())
        if is_private(nodes)
        for directory in sorted(nodes.iterdir())
        if ID_SHAPE.fullmatch(directory.name) and _is_abandoned(directory) and not has_processes(directory.name)
    ]


def remove_abandoned_memory(has_processes: Callable[[str], bool]) -> None:
    """Remove the empty folders in memory of nodes whose keepers were killed together with all other processes.

    No other process would. Only old and empty ones: processes of another container cannot be seen here.
    """
    pattern = Path(memory_directory("local-*"))
    for folder in pattern.parent.glob(pattern.name):
        instance_id = f"local-{folder.name.rpartition('-')[2]}"
        with contextlib.suppress(OSError):  # it is not empty, or another process removes it
            is_old = time.time() - folder.stat().st_mtime > ABANDONED_SECONDS
            if is_old and ID_SHAPE.fullmatch(instance_id) and not has_processes(instance_id):
                folder.rmdir()


def _is_abandoned(directory: Path) -> bool:
    try:
        changed = directory.stat().st_mtime
    except OSError:  # another process removes it
        return False
    try:
        launcher = Owner.parse(*(directory / LAUNCHED_BY).read_text().split("\n")[:2])
    except (OSError, ValueError, TypeError):
        return not any(directory.iterdir()) and time.time() - changed > ABANDONED_SECONDS
    here = Owner.here()
    if launcher.host == here.host and "" not in (launcher.boot, here.boot) and launcher.boot != here.boot:
        # of an earlier boot; but another computer may have the same name and the same home, and writes leases there
        return changed < time.time() - uptime()
    return launcher.state() is OwnerState.DEAD


# Control groups (cgroup v2) for the nodes of this machine: child processes stay in the group of their parent, and the
# kernel kills all of them at once (`cgroup.kill`).
#
# A group is a folder below the group of the process that creates it, or beside that group (`_home`). It needs a
# kernel of 5.14 or later, and a folder that this user may write to. Root has one nearly everywhere, other users below
# their systemd user manager (`user@.service` and its children), and no user in most containers. Its name has the
# instance, the pool and the rank, `skyward.INSTANCE.POOL.RANK`, and its owner is the user: so any process of the same
# user finds it.


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group of one node, by its folder."""

    path: Path
    instance_id: str
    pool_id: str
    rank: int

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Return the group of a folder; None for a folder with another name."""
        found = NAME_SHAPE.fullmatch(path.name)
        return cls(path, found["instance"], found["pool"], int(found["rank"])) if found else None

    @property
    def is_populated(self) -> bool:
        """Whether a living process is in it or in a group below it."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except OSError:  # removed
            return False

    def kill(self) -> None:
        """Have the kernel kill all processes in it, of any user, including forks in progress."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove it with the groups below it; return False if it is still populated."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return not self.path.exists()


def make(instance_id: str, pool_id: str, rank: str) -> ControlGroup | None:
    """Create a group for a node, below that of this process or beside it; return None if that is impossible."""
    home = _home()
    group = None if home is None else ControlGroup.of(home / f"skyward.{instance_id}.{pool_id}.{rank}")
    if group is None:
        return None
    try:
        group.path.mkdir()
    except OSError:
        return None
    if not os.access(group.path / "cgroup.kill", os.W_OK):  # a kernel before 5.14
        group.remove()
        return None
    return group


def all_groups() -> list[ControlGroup]:
    """Return the groups of nodes that this user has created, anywhere in the hierarchy. It takes some milliseconds."""
    hierarchy = call_groups.mount()
    found: list[ControlGroup] = []
    if hierarchy is not None:
        for folder, below, _ in os.walk(hierarchy[1]):
            groups = [
                group
                for name in below
                if name.startswith("skyward.") and (group := ControlGroup.of(Path(folder, name))) is not None
            ]
            for group in groups:
                with contextlib.suppress(OSError):
                    if group.path.stat().st_uid == os.getuid():
                        found.append(group)
    return found


def remove_abandoned(clock: Callable[[], float] = time.time) -> None:
    """Remove the empty groups of nodes that have ended while no process was there to remove them."""
    for group in all_groups():
        with contextlib.suppress(OSError):
            if not group.is_populated and clock() - group.path.stat().st_ctime > ABANDONED_GROUP_SECONDS:
                group.remove()


def _home() -> Path | None:
    """Return the folder for groups of nodes; None if the hierarchy is not visible.

    A group that has processes cannot pass controllers to the groups below it (cgroups(7)). So the folder is the parent
    of this process's group, if the parent passes `memory` and this process's group sets no limits. An example
    is the parent of a login session's group.
    """
    own = call_groups.own_group()
    if own is None:
        return None
    above = own.parent
    passes_memory = "memory" in _read(above / "cgroup.subtree_control").split()
    is_ours = os.access(above, os.W_OK) and os.access(above / "cgroup.procs", os.W_OK)
    return above if passes_memory and is_ours and all(_read(own / name).strip() in NO_LIMIT for name in LIMITS) else own


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return call_groups.read(path)
    return ""


class Local(Provider):
    """Run nodes as processes of this machine.

    `price_per_hour` (USD for one node) makes cost visible without a cloud. A node sees a small part of this process's
    environment (paths, locale, certificates, proxies), as a machine elsewhere would; `ComputePool(env=...)` adds to it.

    Nodes are on demand. With `spot_price_per_hour` this machine sells simulated spot machines too, at this price.
    Nobody takes them back.

    `simulate` ("A100", "A100:2", an `Accelerator`) makes this machine pretend to have these accelerators, so that a
    program for them can be tried without them. Pools that need them open. Calls find them in
    `instance_info().accelerators`, with `is_simulated`. Calls see no GPU, not even a real one of this machine.
    """

    name: ClassVar[str] = "local"
    harmless_fields: ClassVar[frozenset[str]] = frozenset({"price_per_hour", "spot_price_per_hour", "simulate"})
    refuses: ClassVar[Mapping[str, str]] = {
        "apt": (
            "installing Debian packages would change this machine; install them by hand and leave Image(apt=...) out"
        ),
        "shell": (
            "commands that prepare a machine would change this one; run them by hand and leave Image(shell=...) out"
        ),
        "volume": (
            "mounting a bucket would change this machine; read the data in the function, for instance with boto3 or"
            " fsspec"
        ),
        "mig": "it is this machine, whose GPUs are not partitioned; use Hosts with its address",
    }

    is_local: ClassVar[bool] = True
    ending_seconds: ClassVar[float] = 1.0

    price_per_hour: float = Field(default=0.0, ge=0, le=MOST_USD_PER_HOUR)
    """What a node is said to cost, in USD."""
    spot_price_per_hour: float | None = Field(default=None, ge=0, le=MOST_USD_PER_HOUR)
    """The same for simulated spot machines; None: there are none."""
    simulate: (
        Annotated[str, BeforeValidator(lambda value: _as_text(value)), AfterValidator(lambda text: _checked(text))]
        | None
    ) = None
    """The accelerators that this machine pretends to have, as "A100" or "A100:2"."""

    @property
    def simulates(self) -> bool:
        """Whether the accelerators of its machines are simulated."""
        return self.simulate is not None

    def standing_in_for(self, accelerator: Accelerator | None, *, needs_spot: bool) -> Local:
        """Return a copy that simulates what a pool needs and this machine lacks; this provider if there is nothing.

        The accelerator, unless the machine has a GPU or it is for MIG; spot machines, at the price of this machine.
        """
        lacks: dict[str, Any] = {}
        if accelerator is not None and self.simulate is None and not accelerator.mig and not gpus_here():
            lacks["simulate"] = _as_text(accelerator)
        if needs_spot and self.spot_price_per_hour is None:
            lacks["spot_price_per_hour"] = self.price_per_hour
        return self.model_copy(update=lacks) if lacks else self

    def offers(self, want: Requirements) -> list[Offer]:
        """Return this machine, with the GPUs that its driver shows, or those that it simulates: one offer, or a second
        one as a simulated spot machine.

        Raises BadRequest for more nodes than its memory has room for.
        """
        memory_bytes = psutil.virtual_memory().total
        if want.nodes > (most := max(FEW_NODES, memory_bytes // NODE_BYTES)):
            raise BadRequest(
                f"{want.nodes} nodes are too many for this machine: each is several processes with"
                f" {NODE_BYTES / 1e6:.0f} MB or more, and its {memory_bytes / GB:.0f} GB of memory are enough for"
                f" {most}"
            )
        simulated = None if self.simulate is None else parse(self.simulate)
        gpus = gpus_here() if want.accelerator is not None and simulated is None else ()
        if simulated is not None:
            gpus = ((simulated.name, float(simulated.memory_gb)),) * simulated.count
        here = Offer(
            provider=self.name,
            instance_type="local",
            region="local",
            price_per_hour=self.price_per_hour,
            on_demand_price_per_hour=self.price_per_hour,
            vcpus=float(len(os.sched_getaffinity(0))),
            memory_gb=memory_bytes / GB,
            accelerator=_catalogue_name(gpus[0][0]) if gpus else None,
            accelerators=len(gpus),
            architecture=ARCHITECTURES.get(platform.machine()),
            accelerator_memory_gb=gpus[0][1] if gpus else None,
            form_factor=simulated.form_factor if simulated is not None else None,
        )
        if self.spot_price_per_hour is None:
            return [here]
        return [here, here.model_copy(update={"is_spot": True, "price_per_hour": self.spot_price_per_hour})]

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Start `count` sessions that run the startup script."""
        first = int(tags[RANK_TAG])
        return [self._launch_one(offer, of_machine(tags, first + index), startup) for index in range(count)]

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the pool's instances with a living process; without a pool, those of all this user's pools.

        They are sorted by pool. A process belongs to an instance if it has its tag, is below its keeper (which has the
        tag), or is in its control group. Processes of other users are never an instance's because of a tag alone.
        """
        found: dict[str, Instance] = {}
        for _, environ in tagged_processes():
            instance_id, pool = environ.get(INSTANCE_TAG, ""), environ.get(POOL_VARIABLE)
            # machines of other providers may be processes here: containers, the test bed
            if not ID_SHAPE.fullmatch(instance_id) or instance_id in found:
                continue
            if pool is not None and pool_id in (None, pool):
                found[instance_id] = _from_process(environ, pool, instance_id)
        for group in all_groups():
            if group.instance_id not in found and pool_id in (None, group.pool_id) and group.is_populated:
                found[group.instance_id] = _from_process(
                    {RANK_VARIABLE: str(group.rank)}, group.pool_id, group.instance_id
                )
        return sorted(found.values(), key=lambda instance: (instance.pool_id, instance.rank))

    def ends_for_good(self) -> bool:
        """Return True: an instance is nothing but its processes."""
        return True

    def ends(self, ids: Sequence[str]) -> dict[str, NodeEnd]:
        """Return when and why instances have ended, as their keepers have written it."""
        return ends_of(ids, datetime.now(UTC))

    def terminate(self, ids: Sequence[str]) -> dict[str, str]:
        """End every process of these instances, and remove their directories; return the proof of each end.

        SIGTERM is sent first, SIGKILL after a second. An instance is gone when two searches in a row find none of its
        processes: during execve(2) a process shows no environment. Its keepers end last: while one lives, all processes
        below it are found.
        """
        # ids become paths below, and ids of another shape are not ours
        wanted = {instance_id for instance_id in ids if ID_SHAPE.fullmatch(instance_id)}
        directories = {instance_id: _directories(instance_id) for instance_id in wanted}
        groups = {group.instance_id: group for group in all_groups() if group.instance_id in wanted}
        were_populated = {instance_id for instance_id, group in groups.items() if group.is_populated}
        were_kept = {instance_id for instance_id in wanted if any(members(instance_id).values())}
        started = time.monotonic()
        left, signalled, unseen = set(wanted), set[str](), set[str]()
        while left:
            seconds = time.monotonic() - started
            alive = _signal(left, signal.SIGKILL if seconds > TERM_SECONDS else 0)
            _signal(alive - signalled, signal.SIGTERM)
            signalled |= alive
            alive |= _killed(
                {groups[instance_id] for instance_id in left & groups.keys()},
                set() if seconds > 2 * TERM_SECONDS else alive,
            )
            if alive and seconds > KILL_SECONDS:
                raise InstancesLeft(f"processes of {', '.join(sorted(alive))} survive SIGKILL", sorted(alive))
            left, unseen = (left - unseen) | alive, left - alive
            if left:
                time.sleep(0.01)
        proofs = {
            instance_id: _proof(
                instance_id, directories[instance_id], instance_id in were_populated, instance_id in were_kept
            )
            for instance_id in wanted
        }
        for group in groups.values():
            group.remove()
        for instance_id in wanted:
            for directory in directories[instance_id]:
                remove_folders(instance_id, directory)
        return {instance_id: proof for instance_id, proof in proofs.items() if proof}

    def prune(self, now: datetime, *, is_dry_run: bool) -> list[str]:
        """Remove the folders of nodes that were killed together with all processes that would have removed them."""
        populated = {group.instance_id for group in all_groups() if group.is_populated}
        found = abandoned(lambda instance_id: instance_id in populated or bool(members(instance_id)))
        if not is_dry_run:
            for directory in found:
                remove_folders(directory.name, directory)
        return [
            f"folders of ended nodes in {parent}: {number}"
            for parent, number in sorted(Counter(directory.parent for directory in found).items())
        ]

    def _launch_one(self, offer: Offer, tags: dict[str, str], startup: str) -> Instance:
        instance_id = f"local-{uuid.uuid4().hex[:12]}"
        directory = make_folders(instance_id)
        try:
            self._start(instance_id, directory, offer, tags, startup)
        except BaseException:  # a signal too; if a process has started, `terminate` finds it by its tags
            if not members(instance_id):
                remove_folders(instance_id, directory)
            raise
        return _instance(tags, instance_id, self._price(offer), str(directory), is_spot=offer.is_spot)

    def _price(self, offer: Offer) -> float:
        """Return the present price of an offer, which may be of another process with other settings."""
        return (self.spot_price_per_hour or 0.0) if offer.is_spot else self.price_per_hour

    def _start(self, instance_id: str, directory: Path, offer: Offer, tags: dict[str, str], startup: str) -> None:
        owner = this_process()
        environ = kept_environment() | {
            INSTANCE_TAG: instance_id,
            POOL_VARIABLE: tags[POOL_TAG],
            RANK_VARIABLE: tags[RANK_TAG],
            TAGS_VARIABLE: to_word(tags),
            PRICE_VARIABLE: repr(self._price(offer)),
            SPOT_VARIABLE: "1" if offer.is_spot else "",
            DIRECTORY_VARIABLE: str(directory),
            "SKYWARD_OWNER": f"{owner.pid}:{owner.started}",
        }
        command = _keeper_command(
            make(instance_id, tags[POOL_TAG], tags[RANK_TAG]),
            end_file(directory),
            directory,
            memory_directory(instance_id),
        )
        remove_abandoned()
        remove_abandoned_memory(lambda other: bool(members(other)))
        with _in_memory(f"exec </dev/null\n{startup}") as script, (directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "bash", "/proc/self/fd/0"],
                cwd=directory,
                env=environ,
                stdin=script,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            LoopThread("skyward-reap", process.wait).start()
        except RuntimeError:  # nobody would wait for it: then it is no machine
            process.kill()
            process.wait()
            raise


def kept_environment() -> dict[str, str]:
    """Return the part of this process's environment that a node inherits: paths, locale, certificates, proxies.

    It never has credentials or an orchestrator's settings.
    """
    return {
        name: value
        for name, value in _of_nodes().items()
        if not _holds_password(name, value) and not looks_secret(name, value)
    }


def installing_environment() -> dict[str, str]:
    """Return the variables for installing packages that calls must not see: indexes and proxies with a password."""
    return {name: value for name, value in _of_nodes().items() if _holds_password(name, value)}


def _of_nodes() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES) or name.endswith(KEPT_ENDINGS)
    }


def _holds_password(name: str, value: str) -> bool:
    is_of_installer = name.startswith(INSTALLER_PREFIXES)
    has_user = (is_of_installer or name.endswith(PROXY_ENDINGS)) and WITH_USER.search(value) is not None
    return has_user or (is_of_installer and LOGIN_NAME.search(name) is not None)


def _keeper_command(group: ControlGroup | None, ended: Path, *leftovers: str | Path) -> list[str]:
    """Return the command line that starts a command below a keeper.

    The keeper writes into `ended` that the node has ended, and removes the leftovers, if this process is gone by then.
    """
    options = ["--group", str(group.path)] if group is not None else []
    options += ["--ended", str(ended)]
    for path in leftovers:
        options += ["--remove", str(path)]
    return [sys.executable or "python3", "-I", "-S", keeper.__file__, *options, "--"]


def _killed(groups: Iterable[ControlGroup], spared: AbstractSet[str]) -> set[str]:
    """Kill all processes in these groups, except for spared instances, whose processes are ending in order.

    Returns the instances whose groups are not empty.
    """
    populated = [group for group in groups if group.is_populated]
    for group in populated:
        if group.instance_id not in spared:
            group.kill()
    return {group.instance_id for group in populated}


def _proof(instance_id: str, directories: Sequence[Path], was_populated: bool, was_kept: bool) -> str:
    """Return the proof that nothing of an instance is left; "" if there is no trace of it at all."""
    kept = keeper.BY_TREE if was_kept else ""
    for directory in directories:
        with contextlib.suppress(OSError):
            kept = (directory / keeper.KEPT).read_text().strip()
    if was_populated or kept == keeper.BY_GROUP:
        return PROOFS["group"]
    if kept:
        return PROOFS["tree"]
    if not any(directory.exists() for directory in directories):
        return ""
    _log.warning("%s: %s", instance_id, PROOFS["tag"])
    return PROOFS["tag"]


def _signal(ids: set[str], sig: int) -> set[str]:
    """Signal the instances' processes; return those that had any."""
    return {instance_id for instance_id in ids if kill_instance(instance_id, sig)}


def _in_memory(text: str) -> BinaryIO:
    """Return a file without a name, with this text: another user could replace a file that has a path."""
    file = os.fdopen(os.memfd_create("skyward-startup"), "w+b")
    file.write(text.encode())
    file.seek(0)
    return file


def _directories(instance_id: str) -> list[Path]:
    """Return the paths that an instance's folder may have: in our state places, and those that its processes name.

    The latter differ if it was started with other settings.
    """
    named = [
        _directory_of(environ, instance_id)
        for _, environ in tagged_processes()
        if environ.get(INSTANCE_TAG) == instance_id
    ]
    return list(
        dict.fromkeys([*(folder / instance_id for folder in existing(NODES, state_places())), *map(Path, named)])
    )


def _directory_of(environ: Mapping[str, str], instance_id: str) -> str:
    """Return the folder of an instance that one of its processes names."""
    named = environ.get(DIRECTORY_VARIABLE, "")
    if os.path.isabs(named) and Path(named).name == instance_id:
        return named
    return str(existing(NODES, state_places())[0] / instance_id)


def _from_process(environ: Mapping[str, str], pool_id: str, instance_id: str) -> Instance:
    """Return the instance of a process, from the process's environment.

    Variables that a call on the node has removed or changed get defaults: a listing must not fail.
    """
    tags = from_word(environ.get(TAGS_VARIABLE, ""), pool_id, rank_in(environ.get(RANK_VARIABLE, ""), instance_id))
    price = price_in(environ.get(PRICE_VARIABLE, "0"), 0.0, instance_id)
    is_spot = bool(environ.get(SPOT_VARIABLE))
    return _instance(tags, instance_id, price, _directory_of(environ, instance_id), is_spot=is_spot)


def _instance(tags: dict[str, str], instance_id: str, price: float, directory: str, *, is_spot: bool) -> Instance:
    return Instance(
        id=instance_id,
        provider=Local.name,
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=InstanceState.RUNNING,
        region="local",
        instance_type="local",
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        ip="127.0.0.1",
        private_ip="127.0.0.1",
        tags=tags,
        directory=directory,
    )


def _as_text(value: Any) -> Any:
    """Return an accelerator as a string that `parse` reads; any other value as it is."""
    if not isinstance(value, Accelerator):
        return value
    if value.mig:
        raise ValueError("partitions of a GPU are not simulated: leave mig out")
    return f"{value.count}x{value.name}-{value.memory}" + (f"-{value.form_factor}" if value.form_factor else "")


def _checked(text: str) -> str:
    parse(text)  # raises BadRequest with the nearest names
    return text


def _catalogue_name(driver_name: str) -> str:
    """Return the catalogue's name for a driver's name such as "NVIDIA H100 80GB HBM3"; without one, the driver's."""
    try:
        return parse(driver_name).name
    except BadRequest:
        return driver_name
