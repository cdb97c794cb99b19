"""`secrets=`: the spec has references, the processes of calls have the values in memory, and nothing that is written
has them.
"""

import io
import logging
import os
import signal
import subprocess
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.receipt import receipt
from skyward_core.wire.masking import MASK, Mask, spellings
from tests.conftest import RecordedEvents, content_of, processes_by_tag, shared
from tests.fakes import FakeProvider
from tests.unit.test_secret import both_envs
from tests.waiting import wait_until


@given(st.text(min_size=4, max_size=30), st.text(max_size=20), st.text(max_size=20))
@example("a'b\"c%", "x", "")
@example("ab&<\n%2F", "", "")
@settings(max_examples=200, deadline=None, database=None)
def test_every_spelling_of_a_value_is_masked(value: str, before: str, after: str) -> None:
    with suppress(UnicodeEncodeError):  # a lone surrogate, which no variable can hold
        mask = Mask([value])
        for spelled in spellings(value):
            if len(spelled) >= len(value):
                assert spelled == MASK or spelled not in mask.text(before + spelled + after).replace(MASK, "\0")


@sky.compute
def spelled(name: str) -> str | None:
    """Return the value backwards: a result may have it, and the search must not find this one."""
    value = os.environ.get(name)
    return None if value is None else value[::-1]


@sky.compute
def talks(name: str) -> None:
    """Print the value in every way that a program may do by accident."""
    import logging
    import sys

    value = os.environ[name]
    print("plain", value)
    print("twice", value, repr(value), "half", end="")
    print(value, file=sys.stderr)
    logging.getLogger("x").warning("logged %s", value)
    subprocess.run(["sh", "-c", f"echo from a child ${name}"], check=True)


@sky.compute
def fails(name: str) -> None:
    """Raise with the value in the message, an attribute and the cause."""

    class Response:
        def __init__(self, text: str) -> None:
            self.headers = {"Authorization": f"Bearer {text}"}

    value = os.environ[name]
    try:
        raise LookupError(value)
    except LookupError as error:
        failure: Any = ExceptionGroup(
            f"no way with {value}", [OSError(2, f"no {value}", value), ValueError(f"cannot log in with {value}")]
        )
        failure.response = Response(value)
        raise failure from error


@sky.compute
def dies(name: str) -> None:
    """Print the value and exit."""
    print(os.environ[name], flush=True)
    os._exit(3)


@sky.compute
def exits(name: str) -> None:
    """End the process with the value as its exit message."""
    raise SystemExit(os.environ[name])


@dataclass
class Secretive:
    """A pool with a secret, its events, and what the client printed and logged while it opened.

    `plain` is a value in env that looks like a secret.
    """

    pool: sky.ComputePool
    recorded: RecordedEvents
    value: str
    plain: str
    said: str


@pytest.fixture(scope="module")
def secretive() -> Iterator[Secretive]:
    """Two nodes, with a secret under another name than here."""
    recorded, value, plain = RecordedEvents(), f"tok-{uuid.uuid4().hex}", f"plain-{uuid.uuid4().hex}"
    options: dict[str, Any] = {
        "secrets": {"HF_TOKEN": sky.Secret.from_env("OTHER")},
        "env": {"PLAIN": "lemon", "DB_PASSWORD": plain},
    }
    pool = sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, display="log", on_event=recorded, **options)
    said, root = io.StringIO(), logging.getLogger()
    listening = logging.StreamHandler(said)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("OTHER", value)
        patch.setattr(root, "level", logging.DEBUG)
        root.addHandler(listening)
        stack.callback(root.removeHandler, listening)
        with redirect_stdout(said), redirect_stderr(said):
            stack.enter_context(shared(pool))
        root.removeHandler(listening)
        patch.undo()  # it was read when the pool opened
        yield Secretive(pool, recorded, value, plain, said.getvalue())


def test_calls_have_the_values(secretive: Secretive) -> None:
    assert list(spelled("HF_TOKEN") @ secretive.pool) == [secretive.value[::-1]] * 2
    assert secretive.pool.map(spelled, ["HF_TOKEN"] * 50) == [secretive.value[::-1]] * 50
    assert spelled("PLAIN") >> secretive.pool == "nomel"
    assert spelled("OTHER") >> secretive.pool is None


def test_output_is_masked(secretive: Secretive) -> None:
    future = secretive.pool.submit(talks("HF_TOKEN"))
    future.result()
    assert secretive.recorded.lines(future.call_id) == ["plain ***", "from a child ***", "twice *** '***' half"]
    assert secretive.recorded.lines(future.call_id, "stderr") == ["***", "logged ***"]


def test_errors_are_masked(secretive: Secretive) -> None:
    with pytest.raises(ExceptionGroup, match=r"no way with \*\*\*") as caught:
        _ = fails("HF_TOKEN") >> secretive.pool
    error: Any = caught.value
    assert (error.exceptions[0].strerror, error.exceptions[0].filename, error.exceptions[1].args) == (
        "no ***",
        MASK,
        ("cannot log in with ***",),
    )
    assert error.response.headers == {"Authorization": f"Bearer {'*' * len(secretive.value)}"}
    with pytest.raises(sky.CallCrashed) as crashed:
        _ = dies("HF_TOKEN") >> secretive.pool
    assert crashed.value.output == (MASK,)
    with pytest.raises(sky.CallCrashed) as left:
        _ = exits("HF_TOKEN") >> secretive.pool
    for failure in (caught.value, crashed.value, left.value):
        assert secretive.value not in "".join(traceback.format_exception(failure)) + repr(failure) + repr(vars(failure))


def test_a_runner_after_a_crash_has_the_values(secretive: Secretive) -> None:
    """Also for calls whose packets were returned from behind a long call."""
    for _ in range(3):
        with pytest.raises(sky.CallCrashed):
            _ = dies("HF_TOKEN") >> secretive.pool
        assert spelled("HF_TOKEN") >> secretive.pool == secretive.value[::-1]
    slow = [secretive.pool.submit(spelled_slowly("HF_TOKEN", seconds)) for seconds in (0.5, 0.0, 0.0, 0.0) * 4]
    assert [future.result() for future in slow] == [secretive.value[::-1]] * 16


@sky.compute
def spelled_slowly(name: str, seconds: float) -> str:
    """The same, after some time."""
    time.sleep(seconds)
    return os.environ[name][::-1]


def test_nothing_that_is_written_holds_a_value(
    secretive: Secretive, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    pool, state = secretive.pool, Path(os.environ["XDG_STATE_HOME"])
    _ = talks("HF_TOKEN") >> pool
    with suppress(ExceptionGroup):
        _ = fails("HF_TOKEN") >> pool
    texts = [repr(pool), repr(pool.spec), pool.spec.model_dump_json(), pool.lease.model_dump_json(), repr(pool.lease)]
    texts += [repr(secretive.recorded.events), caplog.text, *capfd.readouterr(), default_url(), secretive.said]
    texts.append(repr(vars(pool)))
    assert "DB_PASSWORD as plain text" in secretive.said
    assert [text[:200] for text in texts if secretive.plain in text] == []
    ids = tuple(node.instance.id for node in pool.lease.nodes)
    folders = [state, *(Path(str(node.instance.directory)) for node in pool.lease.nodes)]
    folders += [Path("/dev/shm") / name for name in os.listdir("/dev/shm") if name.endswith(ids)]
    files = {path: content_of(path) for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert {"settings.json", "log", "ledger.db"} <= {path.name for path in files}
    own = [path for path in files if path.is_relative_to(state) and "nodes" not in path.parts]
    assert [path for path in own if secretive.plain.encode() in files[path]] == []
    processes = [pid for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID") if tag in ids]
    assert len(processes) >= 2 * 4
    texts += [content.decode(errors="replace") for content in files.values()]
    for path in (Path(f"/proc/{pid}/{what}") for pid in processes for what in ("environ", "cmdline")):
        with suppress(OSError):
            texts.append(path.read_bytes().decode(errors="replace"))
    assert [text[:200] for text in texts if secretive.value in text] == []
    assert any("HF_TOKEN" in text for text in texts)


@sky.compute
def supervisor() -> int:
    """The first process of the node."""
    return os.getppid()


@sky.compute
def prints(name: str) -> int:
    """Print the value; return its length."""
    print(os.environ[name])
    return len(os.environ[name])


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_replacements_have_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    value, recorded = f"tok-{uuid.uuid4().hex}", RecordedEvents()
    monkeypatch.setenv("HF_TOKEN", value)
    with sky.ComputePool(
        provider=sky.Local(), nodes=2, secrets=("HF_TOKEN",), display="quiet", on_event=recorded, collect_metrics=False
    ) as pool:
        monkeypatch.delenv("HF_TOKEN")
        workers: Any = pool.dask_client().run(os.getpid)
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
        assert list(spelled("HF_TOKEN") @ pool) == [value[::-1]] * 2
        for lost in (1, 0):
            os.kill((supervisor() @ pool)[lost], signal.SIGKILL)
            wait_until(lambda lost=lost: lost in [one.node for one in recorded.of(sky.InstanceLost)], "the loss")
            assert list(spelled("HF_TOKEN") @ pool) == [value[::-1]] * 2
            assert pool.map(spelled, ["HF_TOKEN"] * 10) == [value[::-1]] * 10
        with sky.ComputePool.attach(pool.lease) as attached:
            assert list(spelled("HF_TOKEN") @ attached) == [value[::-1]] * 2
            call = attached.start_detached(prints("HF_TOKEN"))
            assert call.result(60) == len(value)
            assert call.log() == [MASK]
            call.forget()


def test_the_ledgers_file_holds_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "tok-0123456789")
    spec = sky.PoolSpec.of(**{"secrets": ("WORD",), **both_envs().model_dump(exclude_unset=True)})
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        Journal(ledger, "sky-1", spec, FakeProvider(folder=str(tmp_path)), Meter(time.monotonic), lambda _: None).open()
        bill = receipt(ledger, "sky-1")
        written = b"".join(content_of(path) for path in tmp_path.glob("ledger.db*"))
    for value in ("tok-0123456789", "opensesame1", "hf_0123456789"):
        assert value.encode() not in written
        assert value not in str(bill)
    for name in ("WORD", "DB_PASSWORD", "HF_TOKEN"):
        assert name.encode() in written
