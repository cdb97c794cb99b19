"""A rental cloud as an HTTP service on this machine, with faults on demand.

`python -m tests.kill.service FOLDER` prints its port, and ends when its stdin ends.

    GET    /offers                        the offers
    POST   /machines                      {count, type, is_spot, tags, startup, token} -> {machines};
                                          the same token returns the same machines
    GET    /machines?tag=NAME:VALUE&page=N  -> {machines, next}; without a tag all machines
    DELETE /machines/ID                   404: it is gone, or never existed
    DELETE /machines?id=A&id=B            ends all of them
    POST   /machines/ID/shutdown          the machine ends itself

    GET    /admin/console                 all machines with their ends, and every request; waits until no customer
                                          is connected
    POST   /admin/faults                  the fields of `Faults`, all at once
    POST   /admin/save, /admin/restore    save the whole state, and restore it
    POST   /admin/reset                   delete everything; {machines: [...]} exist from then on, as left by another
                                          test

A machine is alive while it is billed: until it is terminated, and also in the state "stopped". Its clock is that of
FOLDER/clock; its files are FOLDER/ID. Stdlib only, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import shutil
import socket
import struct
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.kill.clock import SharedClock

PAGE_SIZE = 4
"""Small, so that two pools need more than one page."""
PRICE_PER_HOUR, SPOT_PRICE_PER_HOUR = 3.6, 1.2
QUIET_SECONDS = 5.0


@dataclass(slots=True)
class Faults:
    """The current faults of the service.

    Numbers decrease with each use; `verb` selects the calls that the general faults affect: "offers", "create", "list",
    "terminate", "".
    """

    lose_create_answers: int = 0
    """Creating calls that take effect and whose connection is then reset."""
    create_lag_seconds: float = 0.0
    """How long listings omit a new machine."""
    short_by: int = 0
    """How many machines fewer than requested the next creating call returns."""
    ignore_terminations: int = 0
    """Terminations of one machine that are answered with OK and do nothing."""
    stop_instead: int = 0
    """Terminations of one machine that only stop it: the bill goes on, and a second termination ends it."""
    hide_listings: int = 0
    """Listings that omit existing machines; the next one shows them again."""
    verb: str = ""
    errors: int = 0
    """Answers with 500."""
    error_seconds: float = 0.0
    """Answers with 500 for this time from now on, on the service's clock."""
    throttles: int = 0
    """Answers with 429 and Retry-After."""
    hangs: int = 0
    """Requests that are never answered, and have no effect."""
    hangs_after: int = 0
    """Requests that take effect and are never answered."""


@dataclass(slots=True)
class Machine:
    """One rented machine. Times are seconds since 1970 on the service's clock."""

    id: str
    type: str
    is_spot: bool
    price_per_hour: float
    rank: int
    tags: dict[str, str]
    startup: str
    directory: str
    created_at: float
    listed_from: float
    state: str = "running"
    """running, stopped, terminated"""
    ended_at: float | None = None
    ended_by: str = ""
    """terminate, shutdown"""

    @property
    def is_billed(self) -> bool:
        return self.ended_at is None


@dataclass(slots=True)
class Answer:
    """The answer to a request. `is_lost`: the connection is reset. `never`: there is no answer."""

    status: HTTPStatus = HTTPStatus.OK
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    is_lost: bool = False
    never: bool = False


class Rental:
    """The state of the service, and how each request changes it. No I/O except the folders of its machines."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._folder = folder
        self._now = now
        self.faults = Faults()
        self._errors_until = 0.0
        self._machines: dict[str, Machine] = {}
        self._by_token: dict[str, list[str]] = {}
        self._requests: list[dict[str, Any]] = []
        self._saved: tuple[Any, ...] = ()

    def answer(self, method: str, path: str, query: list[tuple[str, str]], body: dict[str, Any]) -> Answer:
        """Process the request, unless a fault prevents it; every request is recorded."""
        verb = verb_of(method, path)
        ids = [value for name, value in query if name == "id"] or ([path.split("/")[2]] if path.count("/") > 1 else [])
        noted: dict[str, Any] = {"verb": verb, "ids": ids}
        self._requests.append(noted)
        answer = self._fault(verb) or self._do(verb, ids, query, body)
        if self._is_meant(verb) and self.faults.hangs_after:
            self.faults.hangs_after -= 1
            answer.never = True
        if verb == "create" and isinstance(answer.body, dict):
            noted["ids"] = [machine["id"] for machine in answer.body.get("machines", [])]
        return answer

    def _do(self, verb: str, ids: list[str], query: list[tuple[str, str]], body: dict[str, Any]) -> Answer:
        match verb:
            case "offers":
                prices = {"price_per_hour": PRICE_PER_HOUR, "spot_price_per_hour": SPOT_PRICE_PER_HOUR}
                return Answer(body={"offers": [{"type": "rental.1", "region": "here-1", **prices}]})
            case "create":
                return self._create(body)
            case "list":
                return self._list(dict(query))
            case "terminate":
                return self._terminate(ids, is_single=not query)
            case "shutdown":
                return self._shutdown(ids[0])
            case _:
                return Answer(HTTPStatus.NOT_FOUND, {"error": "no such thing"})

    def _create(self, body: dict[str, Any]) -> Answer:
        token = body["token"]
        if token in self._by_token:
            return self._created(self._by_token[token])
        missing, self.faults.short_by = self.faults.short_by, 0
        count = max(0, body["count"] - missing)
        if not count:
            return Answer(HTTPStatus.CONFLICT, {"code": "capacity", "error": f"no {body['type']} left"})
        first = int(body["tags"].get("skyward-rank", "0"))
        ids = [self._boot(body, rank).id for rank in range(first, first + count)]
        self._by_token[token] = ids
        answer = self._created(ids)
        if self.faults.lose_create_answers:
            self.faults.lose_create_answers -= 1
            answer.is_lost = True
        return answer

    def _boot(self, body: dict[str, Any], rank: int) -> Machine:
        now = self._now()
        machine_id = f"m-{uuid.uuid4().hex[:12]}"
        price = SPOT_PRICE_PER_HOUR if body["is_spot"] else PRICE_PER_HOUR
        tags = {**body["tags"], "skyward-rank": str(rank)}
        folder, listed_from = str(self._folder / machine_id), now + self.faults.create_lag_seconds
        bought = body["type"], body["is_spot"], price, rank, tags, body["startup"]
        machine = Machine(machine_id, *bought, folder, now, listed_from)
        directory = Path(machine.directory)
        directory.mkdir()
        (directory / "log").touch()
        self._machines[machine_id] = machine
        return machine

    def _created(self, ids: list[str]) -> Answer:
        return Answer(HTTPStatus.CREATED, {"machines": [_shown(self._machines[machine_id]) for machine_id in ids]})

    def _list(self, query: dict[str, str]) -> Answer:
        name, _, value = query.get("tag", "").partition(":")
        page = int(query.get("page", "0"))
        hidden = self.faults.hide_listings > 0
        wanted = [machine for machine in self._machines.values() if not name or machine.tags.get(name) == value]
        listed = [
            machine for machine in wanted if machine.listed_from <= self._now() and not (hidden and machine.is_billed)
        ]
        shown = listed[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        is_last = (page + 1) * PAGE_SIZE >= len(listed)
        if hidden and is_last:
            self.faults.hide_listings -= 1
        return Answer(body={"machines": [_shown(machine) for machine in shown], "next": None if is_last else page + 1})

    def _terminate(self, ids: list[str], *, is_single: bool) -> Answer:
        billed = {machine_id for machine_id, machine in self._machines.items() if machine.is_billed}
        unknown = [machine_id for machine_id in ids if machine_id not in billed]
        for machine_id in ids:
            if machine_id not in unknown:
                self._end_or_pretend(self._machines[machine_id])
        if is_single and unknown:
            return Answer(HTTPStatus.NOT_FOUND, {"error": f"{unknown[0]} is gone, or never was"})
        return Answer()

    def _end_or_pretend(self, machine: Machine) -> None:
        if self.faults.ignore_terminations:
            self.faults.ignore_terminations -= 1
        elif self.faults.stop_instead and machine.state == "running":
            self.faults.stop_instead -= 1
            machine.state = "stopped"
        else:
            self._end(machine, "terminate")

    def _shutdown(self, machine_id: str) -> Answer:
        machine = self._machines.get(machine_id)
        if machine is not None and machine.is_billed:
            self._end(machine, "shutdown")
        return Answer()

    def _end(self, machine: Machine, by: str) -> None:
        machine.state, machine.ended_at, machine.ended_by = "terminated", self._now(), by
        shutil.rmtree(machine.directory, ignore_errors=True)

    def _fault(self, verb: str) -> Answer | None:
        if not self._is_meant(verb):
            return None
        if self.faults.hangs:
            self.faults.hangs -= 1
            return Answer(never=True)
        if self.faults.throttles:
            self.faults.throttles -= 1
            return Answer(HTTPStatus.TOO_MANY_REQUESTS, {"error": "slow down"}, {"Retry-After": "1"})
        if self.faults.errors or self._now() < self._errors_until:
            self.faults.errors = max(0, self.faults.errors - 1)
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "out of order"})
        return None

    def _is_meant(self, verb: str) -> bool:
        return verb != "shutdown" and self.faults.verb in ("", verb)

    def break_down(self, fields: dict[str, Any]) -> None:
        self.faults = Faults(**fields)
        self._errors_until = self._now() + self.faults.error_seconds if self.faults.error_seconds else 0.0

    def console(self) -> dict[str, Any]:
        return {
            "machines": [{**asdict(machine), "is_billed": machine.is_billed} for machine in self._machines.values()],
            "requests": self._requests,
        }

    def reset(self, machines: list[dict[str, Any]]) -> None:
        """Start again, with these machines as `console` has shown them."""
        for machine in self._machines.values():
            shutil.rmtree(machine.directory, ignore_errors=True)
        self.break_down({})
        self._requests, self._by_token = [], {}
        self._machines = {
            fields["id"]: Machine(**{name: value for name, value in fields.items() if name != "is_billed"})
            for fields in machines
        }
        for machine in self._machines.values():
            Path(machine.directory).mkdir(exist_ok=True)

    def save(self) -> None:
        self._saved = copy.deepcopy((self.faults, self._errors_until, self._machines, self._by_token, self._requests))

    def restore(self) -> None:
        """Restore the state of `save`. May be called repeatedly."""
        self.faults, self._errors_until, self._machines, self._by_token, self._requests = copy.deepcopy(self._saved)
        for machine in self._machines.values():
            if machine.is_billed:
                Path(machine.directory).mkdir(exist_ok=True)


def verb_of(method: str, path: str) -> str:
    match method, path.split("/")[1:]:
        case "GET", ["offers"]:
            return "offers"
        case "POST", ["machines"]:
            return "create"
        case "GET", ["machines"]:
            return "list"
        case "DELETE", ["machines", *_]:
            return "terminate"
        case "POST", ["machines", _, "shutdown"]:
            return "shutdown"
        case _:
            return ""


def _shown(machine: Machine) -> dict[str, Any]:
    names = ("id", "type", "is_spot", "price_per_hour", "rank", "tags", "directory", "state")
    return {name: getattr(machine, name) for name in names}


class Server:
    """The service on a socket of 127.0.0.1: HTTP/1.1, keep-alive, each request answered in the order of arrival."""

    def __init__(self, rental: Rental) -> None:
        self._rental = rental
        self._customers = 0
        """Connections of clients other than the operator."""
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    async def serve(self, until: Callable[[], Any], on_port: Callable[[int], object]) -> None:
        """Listen on any free port, print it, and serve until `until` is set."""
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        on_port(server.sockets[0].getsockname()[1])
        await until()
        server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_operator = False
        self._count(1)
        try:
            while request := await _read(reader):
                method, target, body = request
                if target.startswith("/admin/"):
                    self._count(is_operator - 1)
                    is_operator = True
                    answer = await self._administer(target.removeprefix("/admin/"), body)
                else:
                    url = urlsplit(target)
                    answer = self._rental.answer(method, url.path, parse_qsl(url.query), body)
                if answer.never:
                    await reader.read()
                    return
                if answer.is_lost:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                    return
                writer.write(_written(answer))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the customer was killed
        finally:
            self._count(is_operator - 1)
            writer.close()

    def _count(self, more: int) -> None:
        self._customers += more
        if self._customers:
            self._is_quiet.clear()
        else:
            self._is_quiet.set()

    async def _administer(self, what: str, body: dict[str, Any]) -> Answer:
        match what:
            case "console":
                await asyncio.sleep(0.001)  # a client that has connected just before is accepted in the meantime
                with contextlib.suppress(TimeoutError):  # the request of a killed customer may still be in transit
                    await asyncio.wait_for(self._is_quiet.wait(), QUIET_SECONDS)
                return Answer(body=self._rental.console())
            case "faults":
                self._rental.break_down(body)
            case "save":
                self._rental.save()
            case "restore":
                self._rental.restore()
            case "reset":
                self._rental.reset(body.get("machines", []))
            case _:
                return Answer(HTTPStatus.NOT_FOUND)
        return Answer()


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, Any]] | None:
    """Return the next request: method, target, JSON body; None at the end of the connection."""
    line = await reader.readline()
    if not line.strip():
        return None
    method, target, _ = line.decode().split()
    length = 0
    while header := (await reader.readline()).strip():
        name, _, value = header.decode().partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return method, target, json.loads(await reader.readexactly(length)) if length else {}


def _written(answer: Answer) -> bytes:
    body = json.dumps(answer.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **answer.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {int(answer.status)} {answer.status.phrase}\r\n{head}\r\n".encode() + body


async def _end_of_stdin() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    transport.close()


def main(folder: Path) -> None:
    with SharedClock(folder / "clock") as clock, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(Rental(folder, clock.time)).serve(_end_of_stdin, lambda port: print(port, flush=True)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
