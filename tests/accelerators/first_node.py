"""The settings of a node, for the tests of this folder."""

from skyward_core.accelerators import Accelerator
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.provisioning.bootstrap import Role, settings_of
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import Transports
from skyward_core.wire.settings import NodeSettings


def settings_of_first_node(
    spec: PoolSpec, accelerator: Accelerator | None, ports: tuple[int, ...] = ()
) -> NodeSettings:
    """Return the settings of the first node of a pool, on a machine with this accelerator."""
    instance = Instance(
        id="i-1",
        provider="local",
        pool_id="p",
        rank=0,
        state=InstanceState.RUNNING,
        region="r",
        instance_type="t",
        directory="/nowhere",
    )
    transports = Transports(60.0, lambda _: None)
    try:
        role = Role(0, 0, "10.0.0.1", "10.0.0.1", 29500, ports=ports)
        return settings_of(transports.to(instance), role, spec, PoolCertificate("pem", "key"), accelerator)
    finally:
        transports.close()
