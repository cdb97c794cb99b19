"""Machines that you own, over SSH, as a provider.

An instance is the set of processes on a host that have its tag in their first environment. One of them is the guard
(`bootstrap.guard_script`). The provider starts it, and it ends all the others. A host carries one instance at a time:
the guard holds a lock of the whole machine, on descriptor 9, and the kernel releases it when the guard dies. The
provider keeps no instances in memory: the first digits of an id's number name its host. For the life of a pool it keeps
only the host keys that it has seen (`for_pool`).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from skyward_core.accelerators import parse
from skyward_core.errors import BadRequest, CommandFailed, HostKeyChanged, InstancesLeft, NoCapacity, SkywardError
from skyward_core.machines.instances import Endpoint, Instance, InstanceState, NodeEnd
from skyward_core.machines.offers import ARCHITECTURES, MOST_USD_PER_HOUR, Offer, Requirements, matches
from skyward_core.providers.base import POOL_TAG, RANK_TAG, Provider, Tags
from skyward_core.providers.host_connections import (
    COMMAND_SECONDS,
    END,
    ENDS,
    LIST,
    LOOK,
    START,
    SWEEP,
    HostAnswer,
    HostConnections,
    SeenKeys,
)
from skyward_core.providers.tagging import TAGS_VARIABLE, from_word, of_machine, price_in, rank_in, to_word
from skyward_core.providers.termination_shell import PROOFS, UNPARTITION_SECONDS
from skyward_core.shown_text import visible_logger
from skyward_core.worker.node_clocks import INSTANCE_TAG
from skyward_core.worker.node_clocks import POOL_TAG as POOL_VARIABLE

GB = 1e9
STRAGGLER_SECONDS = 3.0
"""How long the other hosts may take after the first one has answered, if some of them are enough."""
END_SECONDS = COMMAND_SECONDS + 2 * UNPARTITION_SECONDS
"""The time limit for ending a node: its guard restores the GPUs, and if it fails, the provider does."""
MARK_DIGITS = 5
ID_SHAPE = re.compile(r"host-[0-9a-f]{12}")
ADDRESS_SHAPE = re.compile(
    r"(?:(?P<user>[^\s:@]+(?:@[^\s:@]+)?)@)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[^\s\]]+)?)\]|(?P<host>[^\s:@\[\]/]+))(?::(?P<port>[0-9]{1,5}))?"
)

log = visible_logger(__name__)


class Hosts(Provider):
    """Run nodes on machines of your own: any Linux with sshd, sh, coreutils, grep and util-linux; one node a host.

    >>> Hosts("10.0.0.5", "ubuntu@gpu-box:2222", "root@[fd00::5]:22").addresses
    ('10.0.0.5', 'ubuntu@gpu-box:2222', 'root@[fd00::5]:22')

    `user`, `port` and `key` (the path of a private key without passphrase) hold for addresses without their own. After
    them the SSH agent and ~/.ssh/config are used; `config` may name another file. Host keys come from `known_hosts` (a
    path; ~/.ssh/known_hosts by default), else they are pinned at first contact.

    All files on a host are below one directory, ~/.cache/skyward or its SKYWARD_HOME. Environments stay cached there
    for the next pool, until `sweep_environments`. With `keep_environments=False` they are removed with the last node of
    the host. `price_per_hour` is USD for one host.
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # an address may contain a password, which no message may show

    name: ClassVar[str] = "hosts"
    of_one_computer: ClassVar[frozenset[str]] = frozenset({"key", "known_hosts", "config"})
    harmless_fields: ClassVar[frozenset[str]] = frozenset({"price_per_hour", "keep_environments"})
    terminate_confirms: ClassVar[bool] = True
    gone_deadline_seconds: ClassVar[float] = 20.0
    ending_seconds: ClassVar[float] = 5.0

    addresses: tuple[str, ...] = Field(min_length=1)
    """Each is `[user@]host[:port]`, with IPv6 addresses in brackets; `host` may be an alias of the SSH configuration.

    They are used in this order.
    """
    user: str | None = Field(default=None, min_length=1)
    """For addresses without their own."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """For addresses without their own."""
    key: str | None = Field(default=None, min_length=1)
    """Path of a private key without passphrase; by default the SSH agent and the SSH configuration have one."""
    known_hosts: str | None = Field(default=None, min_length=1)
    """A file to read in place of ~/.ssh/known_hosts."""
    config: str | None = Field(default=None, min_length=1)
    """A file to read in place of ~/.ssh/config."""
    price_per_hour: float = Field(default=0.0, ge=0, le=MOST_USD_PER_HOUR)
    """USD for one host."""
    keep_environments: bool = True
    """Keep environments on the hosts for the next pool; False removes them with the last node of a host."""
    _keys: SeenKeys = PrivateAttr(default_factory=SeenKeys)

    def __init__(self, *addresses: str, **fields: Any) -> None:
        if addresses and "addresses" in fields:
            raise BadRequest("addresses are given twice")
        if len(addresses) == 1 and isinstance(addresses[0], list | tuple):
            raise BadRequest('Hosts takes each address by itself: write Hosts("a", "b"), or Hosts(*addresses)')
        super().__init__(**({"addresses": addresses} if addresses else {}), **fields)

    @field_validator("key")
    @classmethod
    def _is_a_path(cls, key: str | None) -> str | None:
        if key is not None and ("\n" in key or "PRIVATE KEY" in key):
            raise ValueError("key must be the path of a private key, not the key itself")
        return key

    @model_validator(mode="after")
    def _has_hosts_once(self) -> Self:
        places = [(endpoint.host.lower(), endpoint.port) for endpoint in map(self._endpoint, self.addresses)]
        twice = [str(Endpoint(host=host, port=port)) for (host, port), count in Counter(places).items() if count > 1]
        if twice:
            raise ValueError(f"{', '.join(twice)} is named more than once: a host carries one node")
        return self

    @property
    def most_machines(self) -> int:
        """One for each address."""
        return len(self.addresses)

    def for_pool(self) -> Self:
        """Return a copy for one pool's life. It pins each host's key at first sight and refuses a different one."""
        copy = self.model_copy()
        copy._keys = SeenKeys({})
        return copy

    # ── offers, launch, instances, terminate ─────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return an offer for each kind of host: hosts with equal accelerators.

        All hosts are one kind if no accelerator is wanted. An offer has the minimum of what its matching hosts have.
        Hosts that do not answer are left out with a warning. Raises HostKeyChanged if any host shows a wrong key. If no
        host answers, raises the error of the first one.
        """
        with self._connections(self.addresses) as connections:
            seen, silent = self._look(connections, is_for_gpus=want.accelerator is not None)
        if not seen:
            _raise_first(silent)
        groups: dict[object, list[_Host]] = {}
        for host in seen.values():
            kind = (
                host.accelerator,
                host.accelerators,
                host.accelerator_memory_gb,
                want.architecture and host.architecture,
            )
            groups.setdefault(kind, []).append(host)
        return [
            self._offer([host for host in group if matches(self._offer([host]), want) is None] or group)
            for group in groups.values()
        ]

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Start `startup` on the first `count` free hosts that match the offer.

        Ranks rise from tags["skyward-rank"] in the hosts' order. Raises NoCapacity, with the reason for each host, if
        no host is free.
        """
        first = int(tags[RANK_TAG])
        instances: list[Instance] = []
        with self._connections(self.addresses) as connections:
            seen, silent = self._look(connections, is_for_gpus=offer.accelerator is not None)
            if not seen:
                _raise_first(silent)
            reasons = {address: f"does not answer: {error}" for address, error in silent.items()}
            reasons |= {address: reason for address, host in seen.items() if (reason := host.unfit_for(offer))}
            free = [address for address in self.addresses if address not in reasons]
            while free and len(instances) < count:
                ranks = [
                    rank
                    for rank in range(first, first + count)
                    if rank not in {instance.rank for instance in instances}
                ]
                chosen = dict(zip(free, ranks, strict=False))
                free = free[len(chosen) :]
                started, refused = self._start(connections, chosen, offer, tags, startup)
                instances += started
                reasons |= refused
        if not instances:
            raise NoCapacity(
                "no host is free: " + "; ".join(f"{address} {reasons[address]}" for address in self.addresses)
            )
        return sorted(instances, key=lambda instance: instance.rank)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the pool's instances with a living process; without a pool, those of all pools, pool by pool.

        Only the processes of the users that we log in as are seen. Raises the error of the first host that does not
        answer, because its instances are unknown.
        """
        with self._connections(self.addresses) as connections:
            _raise_first(connections.connect())
            answers, failures = connections.ask(LIST, dict.fromkeys(self.addresses, ()))
            _raise_first(failures)
            found = [
                instance
                for address, answer in answers.items()
                for instance in self._found(answer, connections.endpoint(address), pool_id)
            ]
        return sorted(found, key=lambda instance: (instance.pool_id, instance.rank))

    def terminate(self, ids: Sequence[str]) -> dict[str, str]:
        """End every process of these instances and remove their files; return the proof of each end.

        Environments stay cached unless `keep_environments` is False. Only hosts that may carry one of the instances are
        contacted. Raises InstancesLeft with the instances that survive, and those that may be on a host that does not
        answer.
        """
        # ids become paths on the hosts, and ids of another shape are not ours
        wanted = {instance_id for instance_id in ids if ID_SHAPE.fullmatch(instance_id)}
        places = {address: sorted(wanted & self._possible(address, wanted)) for address in self.addresses}
        ids_of = {address: its for address, its in places.items() if its}
        if not ids_of:
            return {}
        with self._connections(list(ids_of)) as connections:
            failures = dict(connections.connect())
            keep = "keep" if self.keep_environments else "remove"
            reached = {address: (keep, *its) for address, its in ids_of.items() if address not in failures}
            answers, failed = connections.ask(END, reached, timeout_seconds=END_SECONDS)
        failures |= failed
        for address, answer in answers.items():
            for warning in answer.all("warning"):
                log.warning("%s: %s", address, warning)
        found = {instance_id for answer in answers.values() for instance_id in answer.all("found")}
        left = {
            tags[INSTANCE_TAG]
            for answer in answers.values()
            for tags in answer.processes
            if tags[INSTANCE_TAG] in wanted
        }
        left |= {instance_id for address in failures for instance_id in ids_of[address]} - (found - left)
        if left:
            why = "; ".join(str(error) for error in failures.values()) or "they survive SIGKILL"
            raise InstancesLeft(f"{', '.join(sorted(left))} may still run: {why}", sorted(left)) from next(
                iter(failures.values()), None
            )
        proofs = [proof.partition(" ") for answer in answers.values() for proof in answer.all("proof")]
        for instance_id, _, kind in proofs:
            if kind == "tag":
                log.warning("%s: %s", instance_id, PROOFS[kind])
        return {instance_id: PROOFS[kind] for instance_id, _, kind in proofs}

    def ends(self, ids: Sequence[str]) -> dict[str, NodeEnd]:
        """Return when and why instances have ended, as their guards have written it on their hosts.

        Hosts that do not answer are left out.
        """
        wanted = {instance_id for instance_id in ids if ID_SHAPE.fullmatch(instance_id)}
        places = {address: sorted(wanted & self._possible(address, wanted)) for address in self.addresses}
        ids_of = {address: its for address, its in places.items() if its}
        if not ids_of:
            return {}
        with self._connections(list(ids_of)) as connections:
            silent = connections.connect()
            reached = {address: its for address, its in ids_of.items() if address not in silent}
            answers, _ = connections.ask(ENDS, reached)
        now = datetime.now(UTC)
        found: dict[str, NodeEnd] = {}
        for line in (line for answer in answers.values() for line in answer.all("ended")):
            instance_id, seconds, reason = [*line.split(" ", 2), "", ""][:3]
            if instance_id in wanted and seconds.isdigit():
                found[instance_id] = NodeEnd(now - timedelta(seconds=int(seconds)), reason or "it gave no reason")
        return found

    def ends_for_good(self) -> bool:
        """Return True: an instance is nothing but its processes."""
        return True

    def may_be_left_to_its_lease(self) -> bool:
        """Return True for hosts without a price: the guard ends the node, if the host runs at all."""
        return self.price_per_hour == 0

    # ── environments ─────────────────────────────────────────────────────────────────────────────────────────────────

    def sweep_environments(self) -> list[str]:
        """Remove the cached environments of all hosts; return the addresses of hosts that were skipped.

        A host is skipped while a node runs there. Raises the error of the first host that does not answer, after the
        others were swept.
        """
        with self._connections(self.addresses) as connections:
            failures = dict(connections.connect())
            answers, failed = connections.ask(
                SWEEP, {address: () for address in self.addresses if address not in failures}
            )
        _raise_first(failures | failed)
        return [address for address in self.addresses if not answers[address].all("swept")]

    # ── addresses, hosts and instances ───────────────────────────────────────────────────────────────────────────────

    def _endpoint(self, address: str) -> Endpoint:
        parts = ADDRESS_SHAPE.fullmatch(address)
        if parts is None or not 1 <= int(parts["port"] or 1) <= 65535:
            raise ValueError(
                'an address is "host", "user@host" or "user@host:2222", with an IPv6 address in brackets; it must not'
                " contain a password"
            )
        return Endpoint(
            host=parts["ipv6"] or parts["host"],
            port=int(parts["port"]) if parts["port"] else self.port,
            user=parts["user"] or self.user,
            key=self.key,
            known_hosts=self.known_hosts,
            config=self.config,
        )

    def _connections(self, addresses: Sequence[str]) -> HostConnections:
        endpoints = {address: self._endpoint(address) for address in addresses}
        pinned = {
            address: endpoint.model_copy(update={"host_key": self._keys.of(address)})
            for address, endpoint in endpoints.items()
        }
        return HostConnections(pinned, self._keys)

    def _look(
        self, connections: HostConnections, *, is_for_gpus: bool
    ) -> tuple[dict[str, _Host], dict[str, SkywardError]]:
        """Return the properties of the hosts, and the errors of those that do not answer.

        Raises HostKeyChanged, and BadRequest for faults in our own files.
        """
        silent = dict(connections.connect(STRAGGLER_SECONDS))
        there = [address for address in self.addresses if address not in silent]
        answers, failed = connections.ask(LOOK, dict.fromkeys(there, ("gpus" if is_for_gpus else "",)))
        silent |= failed
        for address, error in silent.items():
            if isinstance(error, HostKeyChanged | BadRequest):
                raise error
            log.warning("%s is left out: %s", address, error)
        return {address: _Host.of(answer) for address, answer in answers.items()}, silent

    def _start(
        self, connections: HostConnections, chosen: Mapping[str, int], offer: Offer, tags: Tags, startup: str
    ) -> tuple[list[Instance], dict[str, str]]:
        """Start nodes of these ranks; return those that started, and the reason for each other host."""
        ids = {address: f"host-{self._mark(address)}{secrets.token_hex(6)[: 12 - MARK_DIGITS]}" for address in chosen}
        fixed = (repr(offer.price_per_hour), offer.instance_type, str(len(startup.encode())))
        its_tags = {address: of_machine(tags, rank) for address, rank in chosen.items()}
        arguments = {
            address: (ids[address], its[POOL_TAG], its[RANK_TAG], *fixed, to_word(its))
            for address, its in its_tags.items()
        }
        answers, failures = connections.ask(START, arguments, stdin=startup)
        for error in failures.values():
            if not isinstance(error, CommandFailed):  # the node may have started: the caller finds it by its tag
                raise error
        refused = {address: f"could not start a node: {error}" for address, error in failures.items()}
        refused |= {address: _held_by(answer.all("held")) for address, answer in answers.items() if answer.all("taken")}
        started = [
            _instance(
                connections.endpoint(address),
                answer,
                ids[address],
                its_tags[address],
                offer.price_per_hour,
                offer.instance_type,
            )
            for address, answer in answers.items()
            if address not in refused
        ]
        return started, refused

    def _offer(self, hosts: Sequence[_Host]) -> Offer:
        first = hosts[0]
        return Offer(
            provider=self.name,
            instance_type=f"{first.accelerators} x {first.accelerator}" if first.accelerators else self.name,
            region=self.name,
            price_per_hour=self.price_per_hour,
            on_demand_price_per_hour=self.price_per_hour,
            vcpus=min(host.vcpus for host in hosts),
            memory_gb=min(host.memory_gb for host in hosts),
            accelerator=first.accelerator,
            accelerators=first.accelerators,
            accelerator_memory_gb=first.accelerator_memory_gb,
            architecture=first.architecture if all(host.architecture == first.architecture for host in hosts) else None,
        )

    def _mark(self, address: str) -> str:
        endpoint = self._endpoint(address)
        return hashlib.sha256(f"{endpoint.host.lower()} {endpoint.port}".encode()).hexdigest()[:MARK_DIGITS]

    def _possible(self, address: str, ids: Iterable[str]) -> set[str]:
        """Return the ids that may be on this host: those with its mark, and those with an unknown mark.

        A mark is unknown if the instance was launched under another name of the host.
        """
        marks = {self._mark(other) for other in self.addresses}
        mine = self._mark(address)
        return {
            instance_id
            for instance_id in ids
            if (mark := instance_id[5 : 5 + MARK_DIGITS]) == mine or mark not in marks
        }

    def _found(self, answer: HostAnswer, endpoint: Endpoint, pool_id: str | None) -> list[Instance]:
        """Return the instances of a pool, or of all pools, on one host.

        Values that only a guard has get defaults if the guard is dead.
        """
        merged: dict[str, dict[str, str]] = {}
        for variables in answer.processes:
            is_of_pool = POOL_VARIABLE in variables and pool_id in (None, variables[POOL_VARIABLE])
            # ids of another shape belong to another provider, which must end them
            if is_of_pool and ID_SHAPE.fullmatch(variables[INSTANCE_TAG]):
                merged.setdefault(variables[INSTANCE_TAG], {}).update(variables)
        return [
            _instance(
                endpoint,
                HostAnswer(
                    {
                        "ip": (its.get("SKYWARD_PRIVATE_IP", answer.one("ip")),),
                        "directory": (its.get("SKYWARD_INSTANCE_DIRECTORY", ""),),
                    }
                ),
                instance_id,
                from_word(
                    its.get(TAGS_VARIABLE, ""), its[POOL_VARIABLE], rank_in(its.get("SKYWARD_RANK", ""), instance_id)
                ),
                price_in(
                    its.get("SKYWARD_PRICE_PER_HOUR", repr(self.price_per_hour)), self.price_per_hour, instance_id
                ),
                its.get("SKYWARD_INSTANCE_TYPE", self.name),
            )
            for instance_id, its in merged.items()
        ]


def _instance(
    endpoint: Endpoint,
    answer: HostAnswer,
    instance_id: str,
    tags: dict[str, str],
    price_per_hour: float,
    instance_type: str,
) -> Instance:
    return Instance(
        id=instance_id,
        provider=Hosts.name,
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=InstanceState.RUNNING,
        region=Hosts.name,
        instance_type=instance_type,
        price_per_hour=price_per_hour,
        on_demand_price_per_hour=price_per_hour,
        ip=endpoint.host,
        private_ip=answer.one("ip") or None,
        tags=tags,
        directory=answer.one("directory") or None,
        endpoint=endpoint,
    )


def _held_by(pools: Sequence[str]) -> str:
    return f"is held by pool {', '.join(pools)}" if pools else "is held by another user's pool"


def _raise_first(failures: Mapping[str, SkywardError]) -> None:
    """Raise the first host's error, but a wrong host key before all others; do nothing without errors."""
    for error in sorted(failures.values(), key=lambda error: not isinstance(error, HostKeyChanged)):
        raise error


@dataclass(frozen=True, slots=True)
class _Host:
    """What a host has, and the pools that hold it."""

    vcpus: float
    memory_gb: float
    accelerator: str | None
    accelerators: int
    accelerator_memory_gb: float | None
    architecture: Literal["x86_64", "arm64"] | None
    held: Sequence[str]

    @classmethod
    def of(cls, answer: HostAnswer) -> Self:
        gpus = [line.rpartition(",") for line in answer.all("gpu")]
        names = [name.strip() for name, _, _ in gpus]
        mib = gpus[0][2].strip() if gpus else ""
        return cls(
            vcpus=float(answer.one("vcpus")),
            memory_gb=int(answer.one("memory_kib")) * 1024 / GB,
            accelerator=_catalogue_name(names[0]) if gpus else None,
            accelerators=names.count(names[0]) if gpus else 0,
            # "[N/A]" if processor and GPU share their memory
            accelerator_memory_gb=int(mib) * 1024**2 / GB if mib.isdigit() else None,
            architecture=ARCHITECTURES.get(answer.one("machine")),
            held=answer.all("held"),
        )

    def unfit_for(self, offer: Offer) -> str:
        """Return why no node of this offer can start here, or ""."""
        if offer.accelerator is not None and (self.accelerator, self.accelerators) != (
            offer.accelerator,
            offer.accelerators,
        ):
            return f"has {self.accelerators} x {self.accelerator}" if self.accelerator else "has no GPU"
        if offer.accelerator is not None and self.accelerator_memory_gb != offer.accelerator_memory_gb:
            return f"has GPUs with {self.accelerator_memory_gb or 0:.0f} GB"
        if offer.architecture not in {None, self.architecture}:
            return f"is {self.architecture}" if self.architecture else "has another processor"
        if self.vcpus < offer.vcpus or self.memory_gb < offer.memory_gb:
            return f"has {self.vcpus:g} CPUs and {self.memory_gb:.1f} GB"
        return _held_by(self.held) if self.held else ""


def _catalogue_name(driver_name: str) -> str:
    """Return the catalogue's name for a driver's name such as "NVIDIA H100 80GB HBM3"; without one, the driver's."""
    try:
        return parse(driver_name).name
    except BadRequest:
        return driver_name
