"""Acquire and release: the only code that starts or stops spending.

States of a pool's machines, and who undoes what when the client is stopped between two lines:

    nothing -> launch asked for -> launched -> prepared -> leased -> terminated -> known to be gone
               `_give_back`, by tag, on the caller's ExitStack    `release`        the meter ends

A launch that fails may have launched: so `_give_back` asks the provider by tag, never a list kept here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime

from skyward_core import spot
from skyward_core.certificates import PoolCertificate
from skyward_core.errors import InstancesLeft, NoCapacity, NotYetSupported
from skyward_core.events import InfraCreated, InfraCreating, InstanceLaunching, InstanceProvisioned, InstanceStopping, SkywardEvent
from skyward_core.instances import Instance, Lease, Node
from skyward_core.offers import Offer, rank
from skyward_core.providers.base import POOL_TAG, Provider
from skyward_core.provisioning.bootstrap import Preparation, await_scheduler, settings_of, startup_script
from skyward_core.provisioning.metering import Meter
from skyward_core.spec import PoolSpec
from skyward_core.worker.settings import memory_directory

GONE_DEADLINE_SECONDS = 120.0
GONE_POLL_SECONDS = 0.2

type Emit = Callable[[SkywardEvent], object]


def acquire(spec: PoolSpec, provider: Provider, pool_id: str, certificate: PoolCertificate, *, emit: Emit, meter: Meter, undo: ExitStack) -> Lease:
    """Rent and prepare what the spec asks for; return the lease with the address of its scheduler.

    The giving back is pushed on `undo` before anything is launched, and stays there: no interrupt can fall between this function's care and its caller's.
    Raises NoCapacity, BootstrapFailed, ProvisioningTimeout and whatever the provider raises; InstancesLeft, from the undo, says which machines may be left.
    """
    refuse(spec, provider)
    emit(InfraCreating())
    offer = choose(spec, provider)
    emit(InfraCreated(offer.region))
    created_at = datetime.now(UTC)
    deadline = time.monotonic() + spec.provision_timeout
    undo.callback(_give_back, provider, pool_id, emit, meter)
    instances = launch(spec, provider, offer, pool_id, emit=emit, meter=meter)
    scheduler = prepare(spec, provider, instances, certificate, deadline, emit=emit)
    nodes = tuple(Node(instance=instance, rank=instance.rank, workers=1, slots=spec.concurrency) for instance in instances)
    return Lease(pool_id=pool_id, provider=provider.to_json(), nodes=nodes, scheduler=scheduler, created_at=created_at)


def release(lease: Lease, provider: Provider, *, emit: Emit, meter: Meter) -> None:
    """Give the pool's machines back and make sure. May be called again. Raises InstancesLeft if some could not be confirmed gone."""
    _give_back(provider, lease.pool_id, emit, meter)


def refuse(spec: PoolSpec, provider: Provider) -> None:
    """Raise BadRequest for what the provider can never do, before anything is asked of it."""
    asked = {"apt": bool(spec.image.apt), "volume": bool(spec.volume)}
    for feature, reason in type(provider).refuses.items():
        if asked.get(feature):
            raise NotYetSupported(f"{provider.name} does not do {feature}: {reason}")


def choose(spec: PoolSpec, provider: Provider) -> Offer:
    """Return the best offer for the spec. Raises NoCapacity with the reasons, BadRequest if spot is demanded where it is not sold."""
    offers = rank(provider.offers(spec.requirements), spec.requirements)
    is_spot_sold = any(offer.is_spot for offer in offers)
    on_demand_nodes, spot_nodes = spot.split(spec.spot, spec.nodes, is_spot_sold)
    if on_demand_nodes and spot_nodes:
        raise NotYetSupported(f"spot={spec.spot} means {on_demand_nodes} on demand and {spot_nodes} spot: pools are not mixed yet; ask for one kind")
    return next(offer for offer in offers if offer.is_spot == (spot_nodes > 0))


def launch(spec: PoolSpec, provider: Provider, offer: Offer, pool_id: str, *, emit: Emit, meter: Meter) -> list[Instance]:
    """Rent the machines; the meter counts from the moment they are asked for. Raises NoCapacity if fewer came than were asked for."""
    emit(InstanceLaunching(spec.nodes, offer.instance_type, provider.name))
    asked_at = meter.now()
    instances = provider.launch(offer, spec.nodes, {POOL_TAG: pool_id, "skyward-rank": "0"}, startup_script(spec))
    for instance in instances:
        meter.start(instance, asked_at)
        emit(_provisioned(instance))
    if len(instances) < spec.nodes:
        raise NoCapacity(f"{provider.name} had {len(instances)} of {spec.nodes} x {offer.instance_type} in {offer.region}; they have been given back")
    return instances


def prepare(spec: PoolSpec, provider: Provider, instances: list[Instance], certificate: PoolCertificate, deadline: float, *, emit: Emit) -> str:
    """Turn instances into nodes that look for their scheduler; return its address. All are prepared at once, the head's address is the only wait."""
    head, *others = preparations = [Preparation(instance, emit) for instance in instances]
    pool_id, head_port = head.instance.pool_id, _free_port()

    def tell(preparation: Preparation, scheduler: str | None) -> None:
        directories = (memory_directory(preparation.instance.id), str(preparation.directory))
        preparation.tell(settings_of(preparation.instance, spec, certificate, directories, head.instance, head_port, scheduler))

    def gone() -> set[str]:
        return {p.instance.id for p in preparations} - {instance.id for instance in provider.instances(pool_id)}

    tell(head, None)
    scheduler = await_scheduler(preparations, gone, deadline)
    for preparation in others:
        tell(preparation, scheduler)
    for preparation in preparations:
        preparation.follow()
    return scheduler


def _give_back(provider: Provider, pool_id: str, emit: Emit, meter: Meter) -> None:
    """Terminate what the meter knows and what the provider lists, until the provider lists nothing. An outage is waited out, never taken for absence."""
    deadline = time.monotonic() + GONE_DEADLINE_SECONDS
    left, told, trouble = meter.rented(), set[str](), list[Exception]()
    while True:
        listed = _listed(provider, pool_id, trouble)
        left = left if listed is None else left | listed
        for instance_id in sorted(left - told):
            emit(InstanceStopping(instance_id))
        told |= left
        _terminate(provider, left, trouble)
        still = _listed(provider, pool_id, trouble)
        if still is not None:
            left = still
            if not left:
                break
        if time.monotonic() > deadline:
            ids = ", ".join(sorted(left)) or "its machines"
            error = InstancesLeft(
                f"{provider.name} was asked to terminate {ids}; after {GONE_DEADLINE_SECONDS:.0f} s they are not confirmed gone. Look at its console",
                sorted(left),
            )
            error.__cause__ = trouble[-1] if trouble else None
            raise error
        time.sleep(GONE_POLL_SECONDS)
    meter.end_all()


def _listed(provider: Provider, pool_id: str, trouble: list[Exception]) -> set[str] | None:
    """The ids of the pool's machines; None if the provider could not say, which is noted."""
    try:
        return {instance.id for instance in provider.instances(pool_id)}
    except Exception as error:  # a clean-up must go on to the next try
        trouble.append(error)
        return None


def _terminate(provider: Provider, ids: set[str], trouble: list[Exception]) -> None:
    try:
        if ids:
            provider.terminate(sorted(ids))
    except Exception as error:  # likewise
        trouble.append(error)


def _provisioned(instance: Instance) -> InstanceProvisioned:
    return InstanceProvisioned(
        instance_id=instance.id,
        node=instance.rank,
        spot=instance.is_spot,
        provider=instance.provider,
        ip=instance.ip,
        instance_type=instance.instance_type,
        price_on_demand=instance.on_demand_price_per_hour,
        price_spot=instance.price_per_hour if instance.is_spot else None,
    )


def _free_port() -> int:
    """A port that was free a moment ago, for torch's or JAX's rendezvous on the head."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
