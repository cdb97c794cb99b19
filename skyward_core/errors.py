"""Every error of the core, named by what the caller does next.

SkywardError
├── BadRequest (ValueError)        change the spec: it cannot be met as it is written
│   └── NotYetSupported            the spec is sound, this version does not do it yet
├── NotPicklable (TypeError)       pass something else: a value cannot travel
├── CredentialsError               mend the credentials
│   └── LeaseTampered              get the lease from its owner again: it, or a row of the ledger, was altered
├── NoCapacity                     try another offer, region or provider
│   └── QuotaExceeded              ask the provider for more, or try another
├── OfferGone                      ask for offers again
├── ProviderFailed                 try again later: the provider failed or did not answer, and may have done it
│   └── RateLimited                send fewer requests: nothing was done
├── ProvisioningTimeout            the machines did not come up in time
├── BootstrapFailed                mend the image: a machine came up and could not be prepared
├── CallCrashed                    the process of one call died; the slot is back, other calls went on
│   └── CallOutOfMemory            ask for more memory
├── CallTimedOut (TimeoutError)     give it more time: a call ran longer than its `timeout` allows, and was ended
├── NodeLost                       submit again: the machine went away under the call
├── GroupNotFormed                 look at the ranks that it names: they did not come to a distributed training
├── RankFailed                     look at the rank that it names: it failed first, and this one was stopped
├── Skip                           nothing: the function has asked for it, and its orchestrator skips the task
├── GiveUp                         change something first: the function says that another try meets the same
├── RemoteError                    read the text: the call failed with an error whose class does not exist here
├── ResultNotLoaded                install what is missing, then `load()`: the call succeeded, its result is not loaded
├── PoolClosed                     open a pool first
├── Unreachable                    look whether the machine lives, or take another: no SSH to it by the deadline
│   └── ConnectionLost             reconnect, and find out whether the command took effect
├── HostKeyChanged                 find out who answers there: it is not the machine that was known
├── CommandFailed                  read its output: a command on a machine did not succeed
│   └── CommandTimedOut            give it more time, or find out what it waits for
├── InstancesLeft                  look at the console: machines may still be running
├── BudgetExceeded                 allow more money, or ask for less: max_cost or an account is used up
├── LeaseLost                      open another pool: a sweep has found this one dead, and ends its machines
└── LedgerError                    mend what the message names: the ledger could not be read or written
    └── LedgerConflict             look at the entry: the ledger already says otherwise
"""

from __future__ import annotations

import importlib
import logging
import pickle
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Any, Self, cast

from skyward_core.shown_text import each_line, indented, visible, visible_lines

_log = logging.getLogger(__name__)

HIDDEN = "***"
_BEGIN = r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}://)"
_WITH_PASSWORD = re.compile(_BEGIN + r"(?P<user>[^\s/?#@:]{0,500}):(?P<password>\S{0,500})@")
"""A password may have any characters: one that breaks the URL is the very one that an error shows. So it lasts up to
the last "@" before white space.
"""
_WITH_TOKEN = re.compile(_BEGIN + r"(?P<user>[^\s/?#@:]{1,500})@")
_IN_QUERY = re.compile(
    r"(?P<name>[?&][^=&\s?#]{0,100}(?:password|passwd|passphrase|secret|token|api_?key|signature|credential)[^=&\s?#]{0,100}=)"
    r"[^&\s#'\"]+",
    re.IGNORECASE,
)
_TOKEN_SCHEMES = re.compile(r"(?:\w+\+)?https?://", re.IGNORECASE)
"""The user of these may be a token. That of SSH or of a database is none."""
_PLAIN = re.compile(r"sqlite:.*|[\w./~-]+", re.DOTALL)
LEAST_LIKENESS = 0.8
"""Share of equal letters, as difflib counts them. Below it words meet that only look alike: console, nodes."""
ZERO_USD = Decimal(0)


def without_logins(text: str) -> str:
    """Return a text without the passwords and tokens of the URLs in it.

    >>> without_logins("no answer from https://jo:secret@host/simple?token=abc, nor from ssh://git@host")
    'no answer from https://***@host/simple?token=***, nor from ssh://git@host'
    """
    if "://" not in text:
        return text
    text = _WITH_TOKEN.sub(_hidden, _WITH_PASSWORD.sub(_hidden, text))
    return _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text)


def shown_unread(url: str) -> str:
    """Return what may be shown of a text that cannot be read as a URL: any part may be a piece of a password.

    >>> shown_unread("postgresql://jo:secret/db"), shown_unread("/var/lib/ledger.db")
    ('postgresql://***', '/var/lib/ledger.db')
    """
    if _PLAIN.fullmatch(url):
        return url
    scheme = re.match(_BEGIN, url)
    return f"{scheme[0] if scheme else ''}{HIDDEN}"


def _hidden(found: re.Match[str]) -> str:
    scheme, user = found["scheme"], found["user"]
    if _TOKEN_SCHEMES.fullmatch(scheme):
        return f"{scheme}{HIDDEN}@"
    return found[0] if "password" not in found.re.groupindex else f"{scheme}{user}:{HIDDEN}@"


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is a misspelling or a part of; None if there is no clear one.

    Case, "-" and "_" do not count. A part is made of whole words.

    >>> meant("acelerator", ["accelerator", "nodes"]), meant("lifetime", ["max_cost", "max_lifetime"])
    ('accelerator', 'max_lifetime')
    >>> meant("console", ["nodes"]), meant("max_hourly_cost", ["max_cost"])
    (None, None)
    """
    from difflib import get_close_matches  # for mistakes only: it takes a millisecond

    by_key = {_key(one): one for one in known}
    if near := get_close_matches(_key(name), by_key, 1, cutoff=LEAST_LIKENESS):
        return by_key[near[0]]
    words = set(_key(name).split("_"))
    whole = [one for key, one in by_key.items() if words < set(key.split("_"))]
    return whole[0] if len(whole) == 1 else None


def question(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'nodes'?", or "" where no known name is near."""
    near = meant(name, known)
    return "" if near is None else f"did you mean {near!r}?"


def _key(name: str) -> str:
    return name.casefold().replace("-", "_")


type Bytes = bytes | bytearray | memoryview


class SkywardError(Exception):
    """Anything that this library raises on its own account.

    `code` is the provider's own code for it, "" if it has none or got no request. Its texts show no password of a URL,
    and each character in them can be seen (`shown_text.py`): a node or a provider may have written a part of them.
    """

    code = ""
    advice = ""
    """What the user does next, if it is known. The message ends with it."""
    left_nothing = False
    """Whether a launch with this error has certainly created no machine: a refusal, and no answer that was lost."""
    is_final = False
    """Whether another try of the same work meets the same error, or would pay a second time for work that is done.
    Orchestrators do not try such work again.
    """
    needs_change = False
    """Whether another try fails until somebody changes the request or the credentials. Orchestrators do not try such
    work again either, unless the user's own policy for retries says so.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(
            *(
                indented(one) if place == 0 and isinstance(one, str) else one
                for place, one in enumerate(map(_shown, args))
            )
        )

    def coded(self, code: str) -> Self:
        """Note the provider's own word for it, and return the error."""
        self.code = visible(code)
        return self

    def advised(self, advice: str) -> Self:
        """Add to the message what the user does next, and return the error. The first advice stays."""
        if advice and not self.advice:
            self.advice = _shown_text(advice)
            self.args = (indented(f"{str(self).rstrip('.')}. {self.advice}"), *self.args[1:])
        return self

    @property
    def without_advice(self) -> str:
        """The message without the advice, for a text that has its own."""
        return str(self).removesuffix(f". {self.advice}") if self.advice else str(self)


class ShortTraceback(ContextDecorator):
    """A block or a function whose errors of ours leave it without the frames below it, which say nothing to its user.
    The log has them, at level DEBUG. An exception that was being handled before keeps its frames.

    Decorate no function that gets secrets: the decorator's own frame has the arguments as they came.
    """

    def _recreate_cm(self) -> Self:
        return type(self)()

    def __enter__(self) -> None:
        self._handled = sys.exception()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, SkywardError):
            return
        if _log.isEnabledFor(logging.DEBUG):  # as text: error reporters show the variables of a traceback's frames
            _log.debug("%s", "".join(traceback.format_exception(error)).rstrip())
        below: BaseException | None = error
        seen = [self._handled]
        while below is not None and below not in seen:
            seen.append(below)
            below.__traceback__ = None
            below = below.__cause__ or below.__context__


def _shown(argument: object) -> object:
    if isinstance(argument, tuple):
        return tuple(map(_shown, cast("tuple[object, ...]", argument)))
    return _shown_text(argument) if isinstance(argument, str) else argument


def _shown_text(text: str) -> str:
    return visible_lines(without_logins(text))


def _shown_lines(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for line in lines for part in _shown_text(line).split("\n"))


def _with_tail(message: object, output: Iterable[str]) -> str:
    """Return a message with the last lines of a call or a command. Each is indented: it is not our own line."""
    tail = "\n".join(f"  {line}" for line in output)
    return f"{message}\nlast output:\n{tail}" if tail else str(message)


class BadRequest(SkywardError, ValueError):
    """The spec cannot be met as it is written; nothing was started and nothing spent."""

    needs_change = True


class NotYetSupported(BadRequest, NotImplementedError):
    """The spec is sound, but this version does not do it yet; nothing was started and nothing spent."""


class NotPicklable(SkywardError, TypeError):
    """A function, argument or result cannot travel. `path` names the offending part, such as `args[0].client.lock`."""

    is_final = True

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class CredentialsError(SkywardError):
    """The provider refused our credentials, or there are none."""

    needs_change = True
    is_about_spot = False
    """Whether on-demand machines are not concerned: the provider refuses spot machines only."""


class LeaseTampered(CredentialsError):
    """A lease, what the ledger keeps sealed with it, or the provider in a row was altered, or belongs to another pool:
    nothing in it was used.
    """


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one candidate for a pool's machines was not taken. `instance_type` is "" if the query of the provider failed.

    `error` is the class of ours, `code` the provider's own word for it, `seconds` how long it took to say so.
    """

    provider: str
    region: str
    instance_type: str
    spot: bool
    error: str
    code: str
    message: str
    seconds: float

    def __str__(self) -> str:
        region = f"/{self.region}" if self.region else ""
        instance_type = f" {self.instance_type}" if self.instance_type else ""
        what = f"{self.provider}{region}{instance_type}{' spot' if self.spot else ''}"
        return (
            f"{what}: {self.error}{f' ({self.code})' if self.code else ''}"
            f"{f' after {self.seconds:.1f} s' if self.seconds else ''}: {self.message}"
        )


class NoCapacity(SkywardError):
    """No provider sells, or can deliver, what the spec needs right now.

    `refusals` are the candidates that were tried, in their order.
    """

    left_nothing = True
    refusals: tuple[Refusal, ...] = ()
    mistake = ""
    """What the provider said, without the names of one offer, where it may be the request that is wrong: it has one
    status for both.
    """
    if_all: SkywardError | None = None
    """What it means if all candidates are refused in this way: a key without rights, or a cloud's pool that the account
    may not use, have one status.
    """


class QuotaExceeded(NoCapacity):
    """The account may not rent that much."""

    is_about_money = False
    """Whether the account lacks the money: then a dearer machine would be refused too."""

    @classmethod
    def of_money(cls, message: str) -> Self:
        """Return the error of an account without enough money."""
        error = cls(message)
        error.is_about_money = True
        return error


class OfferGone(SkywardError):
    """The offer was withdrawn between asking and launching."""


class ProviderFailed(SkywardError):
    """The provider failed, or did not answer. The machines' state is unknown: the request may have had its effect."""


class RateLimited(ProviderFailed):
    """The provider wants fewer requests; nothing was done."""


class ProvisioningTimeout(SkywardError):
    """Machines were launched but were not ready by the deadline; they have been terminated."""


class BootstrapFailed(SkywardError):
    """A machine could not be prepared; all machines of the pool have been terminated.

    `node` is its rank, `phase` the step of the bootstrap, `exit_code` that of the failed command, `output` its last
    lines.
    """

    def __init__(
        self, message: str, *, node: int = 0, phase: str = "", exit_code: int | None = None, output: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.node = node
        self.phase = phase
        self.exit_code = exit_code
        self.output = _shown_lines(output)


class CallCrashed(SkywardError):
    """The process that ran a call died: a segmentation fault, `os._exit`, a kill.

    It takes that call alone. `node` is the rank of the node, `exit_code` as in `subprocess` (negative: the signal),
    `output` the call's last lines.
    """

    def __init__(self, message: str, node: int = 0, exit_code: int | None = None, output: Sequence[str] = ()) -> None:
        super().__init__(message, node, exit_code, tuple(output))
        self.node = node
        self.exit_code = exit_code
        self.output = _shown_lines(output)

    def __str__(self) -> str:
        return _with_tail(self.args[0], self.output)


class CallOutOfMemory(CallCrashed):
    """The process of a call was killed because it used more memory than its worker has."""


class CallTimedOut(SkywardError, TimeoutError):
    """A call ran longer than its `timeout` allows, and was ended on its node. The slot is back; it is not run again.

    `node` is the rank of the node, `timeout_seconds` the time that the call had, `output` its last lines.
    """

    def __init__(self, message: str, node: int = -1, timeout_seconds: float = 0.0, output: Sequence[str] = ()) -> None:
        super().__init__(message)  # an OSError takes further arguments for the number of an error and a path
        self.node = node
        self.timeout_seconds = timeout_seconds
        self.output = _shown_lines(output)

    def __str__(self) -> str:
        return _with_tail(self.args[0], self.output)


class NodeLost(SkywardError):
    """The node that ran the call is gone: preempted, crashed or out of reach."""


class GroupNotFormed(SkywardError):
    """The processes of a distributed training did not find each other by the deadline.

    `absent` are the ranks that did not come.
    """

    def __init__(self, message: str, absent: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.absent = tuple(absent)


class RankFailed(SkywardError):
    """Another rank of a distributed training failed first, and this one cannot go on.

    `rank` is the first one. A broadcast raises that rank's own error instead.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Skip(SkywardError):
    """Raise it in a function to say that there is nothing to do: `raise sky.Skip("no new rows")`.

    Its orchestrator marks the task as skipped, on a node without that orchestrator too. Elsewhere it is an exception
    like others.
    """

    is_final = True


class GiveUp(SkywardError):
    """Raise it in a function to fail for good: `raise sky.GiveUp("the table has no such column")`.

    Its orchestrator does not try the task again, whatever its retries are. Elsewhere it is an exception like others.
    """

    is_final = True


class RemoteError(SkywardError):
    """A call failed with an exception whose class does not exist here, or that would end this program. Type and message
    stand in the first line.

    `type_name` is the name of the class, with its module ("torch.OutOfMemoryError"), and `text` the remote traceback.
    """

    def __init__(self, message: str, text: str = "", type_name: str = "") -> None:
        super().__init__(message, text, type_name)
        self.text = _shown_text(text)
        self.type_name = visible(type_name)

    def __str__(self) -> str:
        return f"{self.args[0]}\n{each_line('  ', self.text)}" if self.text else str(self.args[0])


class ResultNotLoaded(SkywardError):
    """A call has succeeded, and its result cannot be rebuilt here, most often as a package is missing. The result is
    kept: there is no need to run it again.

    `node` is the rank of the node that has it made, `missing` the name of the package ("" where it is not that).
    `load()` gives the result once the package is there; `result_bytes` is a pickle of it, to be written to a file and
    read where the package is.
    """

    is_final = True

    def __init__(
        self, message: str, node: int = -1, missing: str = "", data: Bytes = b"", buffers: Sequence[Bytes] = ()
    ) -> None:
        super().__init__(message)
        self.node = node
        self.missing = missing
        self._data = data
        self._buffers = tuple(buffers)

    @property
    def result_bytes(self) -> bytes:
        """The result as one pickle, for `pickle.loads`.

        It names classes of the missing package, and of `skyward_core`.
        """
        return pickle.dumps(self.stored, protocol=5)

    @property
    def stored(self) -> Stored:
        """The result as a part of another pickle."""
        return Stored(self._data, self._buffers)

    def load(self) -> Any:
        """Return the result, or for `map`, `@` and `gather` all results.

        Raises what is still in the way, such as ModuleNotFoundError.
        """
        importlib.invalidate_caches()
        # copies: what is done to the result does not change what is kept
        return _loaded(self._data, [bytearray(buffer) for buffer in self._buffers])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.args[0],
            self.node,
            self.missing,
            bytearray(self._data),
            [bytearray(buffer) for buffer in self._buffers],
        )


class Stored:
    """Loads as the value that these bytes are the pickle of; gives them out of band to a pickler that can take them
    so.
    """

    def __init__(self, data: Bytes, buffers: Sequence[Bytes] = ()) -> None:
        self._data = data
        self._buffers = buffers

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (pickle.PickleBuffer(self._data), [pickle.PickleBuffer(buffer) for buffer in self._buffers])


def _loaded(data: Bytes, buffers: Sequence[Bytes]) -> Any:
    return pickle.loads(data, buffers=buffers)


class PoolClosed(SkywardError):
    """The pool is not open: not yet, or not any more."""


class InstancesLeft(SkywardError):
    """Termination was requested, but these machines could not be confirmed gone; `ids` names them."""

    def __init__(self, message: str, ids: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(ids))
        self.ids = tuple(ids)

    def __str__(self) -> str:
        return str(self.args[0])


class Unreachable(SkywardError):
    """The machine could not be reached over SSH by the deadline: look whether it lives, or take another.

    `ComputePool.attach` raises it also for a scheduler that does not answer in time although its head lives: try again.
    """


class ConnectionLost(Unreachable):
    """The connection went away under its user: reconnect, and find out whether the command took effect."""


class HostKeyChanged(SkywardError):
    """The machine shows another host key than the known one: another machine may be answering.

    Nothing was sent to it.
    """


class CommandFailed(SkywardError):
    """A command that had to succeed did not.

    `exit_code` is None if it was ended before it had one, `output` is all that it wrote.
    """

    def __init__(self, message: str, exit_code: int | None = None, output: str = "") -> None:
        super().__init__(message, exit_code, output)
        self.exit_code = exit_code
        self.output = _shown_text(output.replace("\r\n", "\n").replace("\r", "\n"))  # a bar redraws its line

    def __str__(self) -> str:
        return _with_tail(self.args[0], self.output.removesuffix("\n").split("\n")[-20:] if self.output else ())


class CommandTimedOut(CommandFailed, TimeoutError):
    """A command was still running at its deadline; it was sent SIGKILL."""


class BudgetExceeded(SkywardError):
    """The money is used up, or would be: nothing more is started with it.

    `account` is "" for `max_cost`; `left_usd` is what is left.
    """

    is_final = True

    def __init__(self, message: str, account: str = "", left_usd: Decimal = ZERO_USD) -> None:
        super().__init__(message, account, left_usd)
        self.account = account
        self.left_usd = left_usd

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseLost(SkywardError):
    """The pool's lease had run out, and a sweep has taken it for dead: its machines are being ended, whatever its owner
    does.
    """


class PoolStopped(LeaseLost):
    """Somebody has stopped the pool on purpose, with `skyward stop`: no orchestrator tries the step again."""

    is_final = True


class LedgerError(SkywardError):
    """The ledger could not be read or written: mend what the message names, then try again.

    What was committed before is safe.
    """


class LedgerConflict(LedgerError):
    """The ledger already says otherwise: look at the entry. It was left as it was."""
