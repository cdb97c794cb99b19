"""The network: a bridge with this machine's address, a port for each host, and a second bridge that drops
all packets.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.command import ip

FIRST_HOST, LAST_HOST = 2, 254


@dataclass(frozen=True)
class Network:
    """Addresses 10.77.`number`.0/24; this machine is .1, hosts are .2 to .254.

    It has no route out of this machine.
    """

    number: int

    @property
    def bridge(self) -> str:
        return f"tb{self.number}"

    @property
    def void(self) -> str:
        return f"tb{self.number}-void"

    @property
    def gateway(self) -> str:
        return self.address(1)

    def port(self, index: int) -> str:
        """Name, on this machine, of the interface to the host with this index."""
        return f"tb{self.number}-{index}"

    def address(self, index: int) -> str:
        return f"10.77.{self.number}.{index}"

    def build(self) -> None:
        """Create both bridges.

        Every address has its hardware address from the start, so a dead host does not answer, instead of "no route to
        host".
        """
        ip(
            [
                f"link add {self.bridge} address {self._mac(1)} type bridge",
                f"link add {self.void} type bridge",
                f"link set {self.bridge} addrgenmode none",
                f"link set {self.void} addrgenmode none",
                f"addr add {self.gateway}/24 dev {self.bridge}",
                f"link set {self.bridge} up",
                f"link set {self.void} up",
                *self._neighbours(self.bridge),
            ]
        )

    def plug(self, index: int, pid: int, *, is_isolated: bool) -> None:
        """Move an interface into the network namespace of this process, as its eth0."""
        port = self.port(index)
        ip(
            [
                f"link add {port} type veth peer name eth0 address {self._mac(index)} netns {pid}",
                f"link set {port} addrgenmode none",
            ]
        )
        self.join(index, is_isolated=is_isolated)
        ip([f"link set {port} up"])

    def inside(self, index: int) -> str:
        """Return the `ip` commands that the host itself must run to have its address. There is no default route,
        because nothing is reachable outside.
        """
        lines = ["link set lo up", "link set eth0 addrgenmode none up", f"addr add {self.address(index)}/24 dev eth0"]
        return "\n".join([*lines, *self._neighbours("eth0")]) + "\n"

    def join(self, index: int, *, is_isolated: bool) -> None:
        """Connect the host to this machine, and to the other hosts unless it is isolated."""
        isolated = "on" if is_isolated else "off"
        ip(
            [
                f"link set {self.port(index)} master {self.bridge}",
                f"link set {self.port(index)} type bridge_slave isolated {isolated}",
            ]
        )

    def cut(self, index: int) -> None:
        """Drop every packet of the host, both ways, while its interface keeps its carrier.

        Removing it from the bridge would not work, because this machine's own IP stack would take the frames. The
        kernel also undoes a port's "disabled" state at once. So the port moves to a bridge that has no address.
        """
        ip(
            [
                f"link set {self.port(index)} master {self.void}",
                f"link set {self.port(index)} type bridge_slave isolated on",
            ]
        )

    def links(self) -> list[str]:
        """Return the network interfaces of this network that exist on this machine."""
        names = [entry.name for entry in Path("/sys/class/net").iterdir()]
        return sorted(name for name in names if name == self.bridge or name.startswith(f"{self.bridge}-"))

    def remove(self) -> None:
        """Remove both bridges and every interface, whichever of them exist."""
        for name in reversed(self.links()):
            with contextlib.suppress(RuntimeError):  # the kernel may remove a dead host's interface at the same time
                ip([f"link del {name}"])

    def _neighbours(self, device: str) -> list[str]:
        indices = range(FIRST_HOST, LAST_HOST + 1)
        return [
            f"neigh replace {self.address(index)} lladdr {self._mac(index)} dev {device} nud permanent"
            for index in indices
        ]

    def _mac(self, index: int) -> str:
        return f"02:77:00:{self.number:02x}:00:{index:02x}"
