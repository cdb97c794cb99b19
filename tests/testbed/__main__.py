"""`python -m tests.testbed up 3 | gc | preflight`."""

import argparse
import contextlib
import shlex
import signal
import sys
import time

from tests.testbed.fleet import Fleet, watch
from tests.testbed.preflight import why_not
from tests.testbed.sweeping import sweep_abandoned


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description="Hosts made of Linux namespaces.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="bring hosts up and print how to log in; Ctrl-C removes them").add_argument(
        "hosts", type=int, default=3, nargs="?"
    )
    commands.add_parser("gc", help="remove what killed runs left behind")
    commands.add_parser("preflight", help="say in one line why this machine cannot carry hosts, and fail")
    commands.add_parser("watch").add_argument("fleet", type=int)
    arguments = parser.parse_args()
    match arguments.command:
        case "up":
            return _up(arguments.hosts)
        case "gc":
            print(*(f"removed fleet {number}" for number in sweep_abandoned()), sep="\n")
        case "watch":
            watch(arguments.fleet)
        case _:
            if reason := why_not():
                print(reason, file=sys.stderr)
                return 1
    return 0


def _up(hosts: int) -> int:
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), Fleet() as fleet:
        for _ in range(hosts):
            print(shlex.join(fleet.create().ssh()), flush=True)
        print(f"{hosts} hosts in {time.monotonic() - started:.1f} s; Ctrl-C removes them", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
