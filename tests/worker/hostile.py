"""A hostile node: a call that takes the pool's certificate from its node's settings, and lies to all who listen or ask.

Each lie is a pickle that makes a folder in `marks` when it is loaded, or garbage. `watched` runs a program in another
process, whose audit hook notes whatever it unpickles.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import skyward_core as sky

ROOT = Path(__file__).parents[2]

WATCHED = """
import sys
found, begun = [], False
def note(name, args):
    if begun and name == "pickle.find_class":
        found.append(args)
sys.addaudithook(note)
import json
import distributed  # its import unpickles operators
from skyward_core import cli
from skyward_core.engine import connection
import skyward_core as sky
begun = True
{body}
print("UNPICKLED", found)
"""
COMMANDS = """
import shlex
for line in json.loads(sys.argv[1]):
    print("CODE", line, cli.main(shlex.split(line)))
"""
TRIGGER = """
lease, call_id = json.loads(sys.argv[1])
with sky.ComputePool.attach(lease) as pool:
    call = pool.detached_call(call_id)
    cursor = 0
    while not (news := call.follow(cursor)).has_ended:
        cursor = news.cursor
        print("LINES", news.lines)
    print("STATE", news.state, news.lines)
"""
GARBAGE = 7
"""How many kinds of garbage `lie` sends to a topic."""


def watched(body: str, argument: Any, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a program with this JSON argument, and return what it has printed. Its last line is what it has unpickled."""
    program = [sys.executable, "-c", WATCHED.replace("{body}", body), json.dumps(argument)]
    return subprocess.run(program, capture_output=True, text=True, timeout=seconds, cwd=ROOT, check=False)


@sky.compute
def lie(marks: str, topics: Sequence[str], operations: Sequence[str], until: str) -> list[str]:
    """Publish on these topics, and on those of all clients, again and again until there is this file; let the scheduler
    answer these operations with a pickle meanwhile. Return the topics.
    """
    import pickle
    import time
    from pathlib import Path

    import dask
    import distributed

    node = Path.cwd().parent
    settings = json.loads((node / "settings.json").read_text())
    pem, key = settings["tls_certificate"], settings["tls_key"]
    security = distributed.Security(require_encryption=True, tls_ca_file=pem, tls_client_cert=pem, tls_client_key=key)
    address = (node / "head.json").read_text().strip()

    class Evil:
        def __init__(self, name):
            self.path = f"{marks}/{name}"

        def __reduce__(self):
            return os.makedirs, (self.path, 0o700, True)

    def bend(dask_scheduler, marks=marks, names=tuple(operations)):
        import os

        class Evil:
            def __init__(self, name):
                self.path = f"{marks}/{name}"

            def __reduce__(self):
                return os.makedirs, (self.path, 0o700, True)

        handlers = dask_scheduler.handlers
        if not hasattr(dask_scheduler, "honest"):
            dask_scheduler.honest = dict(handlers)
        for name in names:
            handlers[name] = lambda name=name, **_: {"answer": Evil(name), "workers": Evil(name)}
        if not names:
            handlers.update(dask_scheduler.honest)
        calls = dask_scheduler.plugins["skyward-calls"]
        for client in list(dask_scheduler.client_comms):
            stream = [
                {"op": "event", "topic": topic, "event": (0.0, Evil("event"))}
                for topic in (*calls._topics, "skyward-pool", "warn")
            ]
            stream += [
                {
                    "op": "event",
                    "topic": "warn",
                    "event": (0.0, {"message": b"cos\nmkdir\n(V" + f"{marks}/warn".encode() + b"\ntR."}),
                },
                {"op": "task-erred", "key": "skyward-0", "exception": Evil("erred"), "traceback": Evil("erred")},
                {
                    "op": "key-in-memory",
                    "key": "skyward-0",
                    "type": b"cos\nmkdir\n(V" + f"{marks}/type".encode() + b"\ntR.",
                },
                {"op": "no-such-operation", "what": Evil("operation")},
                {
                    "op": "error",
                    "status": "error",
                    "exception": b"cos\nmkdir\n(V" + f"{marks}/status".encode() + b"\ntR.",
                },
            ]
            if names and not client.startswith("Client-skyward-liar"):
                dask_scheduler.send_all({client: stream}, {})
        return [str(topic) for topic in calls._topics]

    valid = bytes([0x95, 0, 0xA1, 0x69, 0xA1, 0x6F, 1, 0x90])
    garbage = [
        pickle.dumps(Evil("topic")),
        b"",
        valid[:-1],
        b"\x91" * 20_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x98\xa6sample\xa1i\x00\xcb\x7f\xf8" + bytes(6),
        bytes(200_000),
    ]
    heard = set(topics)
    dask.config.set({"distributed.client.scheduler-info-interval": "1h"})  # it believes its own lies
    with distributed.Client(
        address, security=security, set_as_default=False, timeout=30, name="skyward-liar"
    ) as client:
        while not Path(until).exists():
            heard.update(client.run_on_scheduler(bend))
            for topic in heard:
                for message in garbage:
                    client.log_event(topic, message)
                client.log_event(topic, {"request": 1, "number": 2**60, "tasks": {}})
                client.log_event(topic, 7)
            time.sleep(0.2)
        client.run_on_scheduler(bend, names=())
    return sorted(heard)
