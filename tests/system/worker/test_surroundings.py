"""What calls find and leave on their node: metrics and log records, GPUs, variables, folders, groups."""

import itertools
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.providers import local as control_groups
from skyward_core.transport import ssh_transport
from skyward_core.wire.info import ENV, to_env
from skyward_core.wire.log_records import LogLines, split_records
from skyward_core.wire.messages import BURST
from skyward_core.worker.runner import RewrittenVariable
from tests.conftest import RecordedEvents
from tests.unit.worker.test_call_groups import PLACES, hierarchy
from tests.unit.worker.test_private_folders import made
from tests.unit.worker.test_shard import place


@sky.compute
def train(steps: int) -> str:
    import numpy as np

    for step in range(steps):
        sky.report(step=step, loss=np.float32(1 / (1 + step)), secret_name=True)
    print("trained")
    return "done"


@sky.compute
def train_and_die() -> None:
    sky.report(step=1, loss=0.5)
    os._exit(3)


def test_a_call_reports_while_it_runs(pool: sky.ComputePool, recorded: RecordedEvents):
    future = pool.submit(train(1000))
    assert future.result() == "done"
    reports = [event for event in recorded.of(sky.CallReported) if event.call_id == future.call_id]
    assert len(reports) == BURST + 2
    assert [event.is_last for event in reports] == [False] * (BURST + 1) + [True]
    assert (reports[0].step, reports[0].values) == (0, {"loss": 1.0, "secret_name": 1.0})
    assert (reports[-1].step, reports[-1].values["loss"]) == (999, pytest.approx(0.001))
    assert reports[0].timestamp > 0
    assert [line.line for line in recorded.of(sky.LogLine) if line.call_id == future.call_id] == ["trained"]


def test_a_call_that_dies_has_reported(pool: sky.ComputePool, recorded: RecordedEvents):
    future = pool.submit(train_and_die())
    with pytest.raises(sky.CallCrashed) as crash:
        future.result()
    assert "report" not in str(crash.value)
    reports = [event for event in recorded.of(sky.CallReported) if event.call_id == future.call_id]
    assert [(event.step, event.values, event.is_last) for event in reports] == [
        (1, {"loss": 0.5}, False),
        (1, {"loss": 0.5}, True),
    ]


@sky.compute
def draw_a_bar(states: int) -> None:
    for state in range(1, states + 1):
        sys.stderr.write(f"\r{state} of {states}")
        sys.stderr.flush()
        if state == states // 2:
            logging.getLogger("test_bar").warning("half of it")
    sys.stderr.write("\n")


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_progress_bar_is_few_lines_and_its_last_state(
    pool: sky.ComputePool, recorded: RecordedEvents, is_detached: bool
):
    if is_detached:
        call = pool.start_detached(draw_a_bar(500))
        call.result()
        lines = call.log()
    else:
        future = pool.submit(draw_a_bar(500))
        future.result()
        lines = recorded.lines(future.call_id, "stderr")
    assert "half of it" in lines
    assert lines[-1] == "500 of 500"
    assert len(lines) <= 4


@sky.compute
def log_at_all_levels(names: list[str]) -> None:
    for name in names:
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s %d", name, level)


@pytest.mark.parametrize("is_detached", [False, True])
def test_the_levels_of_the_client_hold_on_the_node(
    pool: sky.ComputePool, recorded: RecordedEvents, caplog: pytest.LogCaptureFixture, is_detached: bool
):
    """The root logger's as `basicConfig` sets it, those of other loggers as the user or an orchestrator has set them,
    and each for its own calls. What arrives is shown.
    """
    names = ["test_plain", "test_extra", "test_noisy"]

    def lines() -> list[str]:
        if is_detached:
            call = pool.start_detached(log_at_all_levels(names))
            call.result()
            return call.log()
        future = pool.submit(log_at_all_levels(names))
        future.result()
        return [line.line for line in recorded.of(sky.LogLine) if line.call_id == future.call_id]

    with caplog.at_level(logging.INFO):
        with caplog.at_level(logging.DEBUG, "test_extra"), caplog.at_level(logging.ERROR, "test_noisy"):
            told = ["test_plain 20", "test_plain 30", "test_extra 10", "test_extra 20", "test_extra 30"]
            assert lines() == told
        assert lines() == [f"{name} {level}" for name in names for level in (20, 30)]
    with caplog.at_level(logging.WARNING):
        assert lines() == [f"{name} 30" for name in names]


MARK = b"\x1e0123456789abcdef\x1e"
START = MARK[:-1].decode() + ":"


@sky.compute
def write_everything() -> None:
    import contextlib
    import io

    print("a line")
    logging.getLogger("mine").warning("two\nlines")
    print("no line end yet", end="")
    sys.stdout.flush()
    try:
        raise ValueError("boom")
    except ValueError:
        logging.exception("it failed")
    logging.basicConfig(level=logging.DEBUG, format="%(name)s says %(message)s", stream=sys.stdout, force=True)
    logging.getLogger("mine").debug("of little use")
    logging.getLogger("mine").error("ünïcode \x1e \r and a 'quote\"")
    own = io.StringIO()
    elsewhere = logging.StreamHandler(own)
    logging.getLogger("elsewhere").addHandler(elsewhere)
    logging.getLogger("elsewhere").propagate = False
    logging.getLogger("elsewhere").error("kept")
    print("elsewhere:", repr(own.getvalue()))
    with contextlib.redirect_stdout(own):
        print("not seen")
    print("the end")


@sky.compute
def log_and_die() -> None:
    import os

    logging.error("first\nsecond")
    os._exit(3)


def test_a_record_arrives_whole_and_with_its_level(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """By Python's last resort and by handlers of the call's own. Printed text has no level, and records for other
    outputs stay there.
    """
    future = pool.submit(write_everything())
    future.result()
    lines = [line for line in recorded.of(sky.LogLine) if line.call_id == future.call_id]
    out = [(line.level, line.line) for line in lines if line.stream == "stdout"]
    assert out == [
        (None, "a line"),
        (None, "no line end yet"),
        (logging.DEBUG, "mine says of little use"),
        (logging.ERROR, "mine says ünïcode \\x1e \\r and a 'quote\""),
        (None, "elsewhere: 'kept\\n'"),
        (None, "the end"),
    ]
    warning, failure = [line for line in lines if line.stream == "stderr"]
    assert (warning.level, warning.line) == (logging.WARNING, "two\nlines")
    assert failure.level == logging.ERROR
    assert failure.line.startswith("ERROR:root:it failed\nTraceback (most recent call last):\n")
    assert failure.line.endswith("\nValueError: boom")


def test_the_last_lines_of_a_call_that_dies_are_lines(pool: sky.ComputePool) -> None:
    try:
        log_and_die() >> pool
    except sky.CallCrashed as error:
        assert "first\n" in str(error)
        assert "\x1e" not in str(error)
    else:
        raise AssertionError("it lived")


@given(
    st.lists(st.one_of(st.text(st.characters(exclude_characters="\n\r\x1e")), st.tuples(st.integers(0, 60), st.text())))
)
def test_lines_and_records_are_read_back_in_their_order(written: list[str | tuple[int, str]]) -> None:
    """Adjacent texts of one level come together; nothing is lost or changed."""
    import json

    lines = [item if isinstance(item, str) else f"{START}{item[0]} {json.dumps(item[1])}" for item in written]
    read = list(split_records(MARK, lines))
    assert [(group.level, text) for group in read for text in group.texts] == [
        (None, item) if isinstance(item, str) else item for item in written
    ]
    assert all(one.level != other.level for one, other in itertools.pairwise(read))


def test_a_record_after_text_without_a_line_end_and_one_cut_short() -> None:
    assert list(split_records(MARK, [f'abc{START}40 "x"'])) == [LogLines(None, ("abc",)), LogLines(40, ("x",))]
    assert list(split_records(MARK, [f'{START}40 "x'])) == [LogLines(None, ('"x',))]


@pytest.fixture(scope="module")
def one_node() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


@sky.compute
def process_id() -> int:
    return os.getpid()


@pytest.mark.parametrize(
    ("text", "is_new"),
    [
        ("CUDA error: device-side assert triggered", True),  # PyTorch
        ("HIP error: an illegal memory access was encountered", True),
        (
            "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
            True,
        ),  # the driver interface
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", True),  # CuPy
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", False),
        ("no column cuda", False),
    ],
)
def test_the_next_call_has_a_new_process_if_the_last_one_broke_its_gpu(
    one_node: sky.ComputePool, text: str, is_new: bool
) -> None:
    """CUDA repeats the error in the same process, and each retry would fail."""
    before = process_id() >> one_node
    with pytest.raises(RuntimeError, match=text[:30]):
        fail(text) >> one_node
    assert (process_id() >> one_node != before) is is_new


@sky.compute
def fail(text: str) -> None:
    raise RuntimeError(text)


NAME = "SKYWARD_TEST_VARIABLE"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")


def seen_by_a_child() -> str:
    return subprocess.run(["sh", "-c", f'printf %s "${NAME}"'], capture_output=True, text=True, check=True).stdout


def test_it_is_visible_here_and_in_every_process_that_is_started() -> None:
    """A short value after a long one has blanks at its end, and no rest of the old value."""
    variable = RewrittenVariable(NAME)
    for value in ("short", " and much longer than the one before it" * 9, "short again"):
        variable.set(value)
        assert os.environ[NAME].rstrip() == value
        assert seen_by_a_child().rstrip() == value
        assert os.environb[NAME.encode()].rstrip() == value.encode()


def test_removing_it_does_not_prevent_the_next_value() -> None:
    variable = RewrittenVariable(NAME)
    variable.set("one")
    del os.environ[NAME]
    assert seen_by_a_child() == ""
    variable.set("two")
    os.environ[NAME] = "a call's own"
    assert seen_by_a_child() == "a call's own"
    variable.set("three")
    assert (os.environ[NAME].rstrip(), seen_by_a_child().rstrip()) == ("three", "three")


def test_a_value_that_no_variable_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        RewrittenVariable(NAME).set("a\0b")


def test_a_process_started_by_the_call_sees_the_same() -> None:
    """The place travels in the environment, so a child process has the rank and the accelerators of its parent."""
    code = "from skyward_core.wire.info import *; i = instance_info(); print(i.rank, i.world_size, i.job_id, current_accelerator())"
    env = {**os.environ, ENV: to_env(place(1, 2))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "2", "job-1", "H100"]


@pytest.mark.parametrize("case", PLACES)
def test_a_group_on_a_host_is_made_in_the_same_place(case: str, tmp_path: Path) -> None:
    """The shell script finds the same place."""
    own, expected = hierarchy(tmp_path, case)
    completed = subprocess.run(
        ["sh", "-euc", f'parent=$1\n{ssh_transport.PLACE}\necho "$parent"', "sh", str(own)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.strip() == expected


AS_ON_MACOS = """
import os, sys
del os.O_PATH

def without_proc(real):
    def call(path, *arguments, **named):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "no /proc here", path)
        return real(path, *arguments, **named)
    return call

for name in ("readlink", "open", "stat", "access"):
    setattr(os, name, without_proc(getattr(os, name)))
from pathlib import Path
from skyward_core.paths import first_private
from skyward_core.wire.private_folders import make_private
print(first_private("nodes", [("A", lambda: Path(sys.argv[1]))], is_locked=True), make_private(Path(sys.argv[1], "b")))
"""


def test_a_client_without_proc_has_its_places(tmp_path: Path) -> None:
    """macOS has neither /proc nor O_PATH. The path is resolved there too."""
    (tmp_path / "link").symlink_to(made(tmp_path / "real"))
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_MACOS, str(tmp_path / "link" / "skyward")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(tmp_path / "real/skyward/nodes"), str(tmp_path / "real/skyward/b")], done.stderr


def test_a_call_finds_its_user_s_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that belongs to somebody else stays theirs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    @sky.compute
    def limit() -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")

    with sky.ComputePool(provider=sky.Local(), display="quiet") as limited:
        assert limit() >> limited == ("1,2", "PCI_BUS_ID")


def test_calls_behind_one_that_broke_its_gpu_run_in_a_new_process(one_node: sky.ComputePool) -> None:
    """None is lost, and none runs twice."""
    calls = one_node.submit_all([process_id(), fail("CUDA error: unspecified launch failure"), *[process_id()] * 20])
    before, *after = [call.result() for number, call in enumerate(calls) if number != 1]
    assert before not in after
    assert len(set(after)) == 1


def keeps_limits() -> bool:
    """Whether the group of a node would have the memory controller here."""
    made = control_groups.make(f"local-{uuid.uuid4().hex[:12]}", "sky-test-probe", "0")
    if made is None:
        return False
    try:
        return "memory" in (made.path / "cgroup.controllers").read_text().split()
    finally:
        made.remove()


@pytest.mark.skipif(not keeps_limits(), reason="no cgroup v2 whose memory controller a node's group would have")
def test_memory_of_processes_that_a_call_has_started_counts_too() -> None:
    """The call itself stays small: only the kernel sees the memory of its child."""

    @sky.compute
    def hoard(mib: int) -> int:
        return subprocess.run(["python3", "-c", f"x = bytearray({mib} << 20); print(len(x))"], check=False).returncode

    with sky.ComputePool(provider=sky.Local(), memory="400MB", display="quiet") as pool:
        with pytest.raises(sky.CallOutOfMemory, match="control group"):
            hoard(800) >> pool
        assert hoard(10) >> pool == 0
