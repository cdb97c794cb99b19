"""A test bed of real machines with faults: hosts with address, disk, processes and `sshd`, made of Linux namespaces.

    with Fleet() as fleet:
        host = fleet.create()
        host.run("hostname")
        host.kill()

It needs only the standard library, Python 3.11 or newer, root, and the Debian packages openssh-server, openssh-client and
iproute2. By hand: `python -m tests.testbed up 3`, `gc`, `preflight`.
"""

from tests.testbed.fleet import Fleet as Fleet
from tests.testbed.host import Host as Host
from tests.testbed.preflight import why_not as why_not
from tests.testbed.sweeping import leftovers as leftovers
from tests.testbed.sweeping import sweep_abandoned as sweep_abandoned
