"""The notice before a spot machine is taken back, polled on the machine itself.

EC2 has it at the machine's metadata service (IMDSv2; facts: AWS's user guide, "Spot Instance interruption notices"
and "rebalance recommendations"): `spot/instance-action` is 404 until about two minutes before the machine is taken,
then JSON with action and time, on a best effort basis; `events/recommendations/rebalance` may say earlier that the risk
has grown. AWS recommends to poll every five seconds.

A separate process polls, forked by the node's supervisor: a service that hangs delays nothing else, and the process
ends with the supervisor. It prints each notice as a line `::skyward notice JSON` of the node's log. The client reads
the log without the head. Calls on the node read the announced end in the file NOTICE_FILE of the node's directory
(`preemption_notice`). A failed request is no notice; the first failure is logged.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

from skyward_core.wire.info import NOTICE_SECONDS, Kind, Notice, within_a_notice
from skyward_core.wire.settings import write_atomically

MARK = "::skyward notice "
NOTICE_FILE = "preemption"
"""Has the end of the machine, in seconds of its monotonic clock."""
FILE_ENV = "SKYWARD_PREEMPTION_FILE"
"""The environment variable with the path of NOTICE_FILE, so that processes started by a call find it too."""
ASK_EVERY_SECONDS = 5.0
ANSWER_SECONDS = 2.0
TOKEN_SECONDS = 21_600
"""The longest life of a token of EC2."""
ANSWER_BYTES = 65_536

TOKEN = "/latest/api/token"  # noqa: S105 - a path
INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
ACTIONS = frozenset({"terminate", "stop", "hibernate"})


class MetadataService:
    """A metadata service in the manner of EC2's, at an address such as `http://169.254.169.254`.

    Follows no proxy. One caller at a time.
    """

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS) -> None:
        parts = urlsplit(url)
        self._place = (str(parts.hostname), parts.port or 80)
        self._answer_seconds = answer_seconds
        self._token = ""

    def interruption(self) -> Notice | None:
        """Return whether the machine is to be taken back.

        Raises OSError, HTTPException or ValueError for any other answer.
        """
        answer = self._content_of(INTERRUPTION)
        return None if answer is None else _interruption(*answer)

    def rebalance(self) -> Notice | None:
        """Return whether that is more likely than before. Raises the same."""
        answer = self._content_of(REBALANCE)
        return None if answer is None else _rebalance(answer[0])

    def _content_of(self, path: str) -> tuple[bytes, float] | None:
        """Return the content of a path, and the service's time; None if it has none."""
        status, body, now = self._get(path)
        if status not in (200, 404):
            raise HTTPException(f"{path}: status {status}")
        return (body, now) if status == 200 else None

    def _get(self, path: str) -> tuple[int, bytes, float]:
        """Send a request with the present token, or with a new one if the present one has expired."""
        if self._token:
            answer = self._send("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer[0] != 401:
                return answer
        status, body, _ = self._send("PUT", TOKEN, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
        if status != 200:
            raise HTTPException(f"{TOKEN}: status {status}")
        self._token = body.decode("ascii").strip()
        return self._send("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _send(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes, float]:
        """Return status, body, and the time of the service's clock, in seconds since 1970."""
        with contextlib.closing(HTTPConnection(*self._place, timeout=self._answer_seconds)) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(ANSWER_BYTES), _time_of(response)


class NoticePoller:
    """Polls a metadata service, and passes each notice on once. `complain` gets the first failure only."""

    def __init__(
        self, metadata: MetadataService, report: Callable[[Notice], object], complain: Callable[[str], object]
    ) -> None:
        self._metadata = metadata
        self._report = report
        self._complain = complain
        self._reported: set[tuple[Kind, str, float]] = set()
        self._has_complained = False

    def look(self) -> None:
        """Request each kind of notice once. A failure of one does not affect the other.

        Raises nothing but what `report` and `complain` raise.
        """
        for ask in (self._metadata.interruption, self._metadata.rebalance):
            try:
                notice = ask()
            except (OSError, HTTPException, ValueError) as error:
                if not self._has_complained:
                    self._has_complained = True
                    self._complain(
                        f"spot notices: no answer of the metadata service ({error!r}); the next request is in"
                        f" {ASK_EVERY_SECONDS:g} s"
                    )
                continue
            if notice is not None and (mark := (notice.kind, notice.action, notice.at)) not in self._reported:
                self._report(notice)
                self._reported.add(mark)


def listen(url: str, directory: Path) -> NoReturn:
    """Poll without end, print each notice and note it for calls: the main function of a process that dies with its
    parent.
    """

    def report(notice: Notice) -> None:
        print(MARK + notice.to_text(), flush=True)
        note(notice, directory)

    listener = NoticePoller(MetadataService(url), report, lambda text: print(text, flush=True))
    while True:
        listener.look()
        time.sleep(ASK_EVERY_SECONDS)


def note(notice: Notice, directory: Path) -> None:
    """Write the end of the machine into the node's directory, for `preemption_notice`. A full disk is no error."""
    if notice.kind is Kind.INTERRUPTION:
        with contextlib.suppress(OSError):
            write_atomically(directory / NOTICE_FILE, repr(time.monotonic() + notice.seconds_left))


def preemption_notice() -> float | None:
    """Return in how many seconds the cloud takes this spot machine back; None if it has not announced that.

    For a call: save a checkpoint when it is not None. AWS announces it about two minutes before, on a best effort
    basis; of the other providers none does (`docs/machines/lost-node.md`). 0.0 if the time is over. Outside a pool it
    is None.

    >>> preemption_notice() is None
    True
    """
    path = os.environ.get(FILE_ENV)
    if not path:
        return None
    try:
        return max(0.0, float(Path(path).read_text(encoding="utf-8")) - time.monotonic())
    except (OSError, ValueError):  # there is none
        return None


def _interruption(body: bytes, now: float) -> Notice:
    """Read `{"action": "terminate", "time": "2026-11-21T08:22:00Z"}`. Without a time it
    counts as NOTICE_SECONDS away.

    Raises ValueError for any other text.
    """
    answer = _object(body)
    action = str(answer.get("action"))
    if action not in ACTIONS:
        raise ValueError(f"{INTERRUPTION}: {body[:200]!r}")
    at = _seconds_since_1970(answer.get("time"))
    return Notice(
        Kind.INTERRUPTION,
        action,
        now + NOTICE_SECONDS if at is None else at,
        NOTICE_SECONDS if at is None else within_a_notice(at - now),
    )


def _rebalance(body: bytes) -> Notice:
    """Read `{"noticeTime": "2026-11-21T08:20:00Z"}`. Raises ValueError for any other text."""
    at = _seconds_since_1970(_object(body).get("noticeTime"))
    if at is None:
        raise ValueError(f"{REBALANCE}: {body[:200]!r}")
    return Notice(Kind.REBALANCE, "", at)


def _object(body: bytes) -> dict[str, Any]:
    match json.loads(body):
        case dict() as answer:
            return cast("dict[str, Any]", answer)
        case _:
            raise ValueError(f"no JSON object: {body[:200]!r}")


def _seconds_since_1970(text: object) -> float | None:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _time_of(response: HTTPResponse) -> float:
    """Return the service's time, because the machine's own clock may be wrong; the machine's if there is none."""
    try:
        return parsedate_to_datetime(str(response.getheader("Date"))).timestamp()
    except ValueError:
        return time.time()
