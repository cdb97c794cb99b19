"""A call on a real pool writes hostile texts, with `display="log"` in a program that has not configured logging."""

import subprocess
import sys
from pathlib import Path

from tests.hostile_texts import HOSTILE_TEXTS, refuse_lines_of_ours

PROGRAM = """
import json
import sys
from pathlib import Path

import skyward_core as sky

texts = json.loads(Path(sys.argv[1]).read_text())


@sky.compute
def talk(texts: list[str]) -> None:
    import logging

    log = logging.getLogger("mine")
    for text in texts:
        print(text, flush=True)
        log.warning("%s", text)
    sky.report(step=1, **{texts[0]: 1.0})


@sky.compute
def fail(text: str) -> None:
    raise ValueError(text)


@sky.compute
def die(texts: list[str]) -> None:
    import os

    for text in texts:
        print(text, flush=True)
    os._exit(7)


with sky.ComputePool(provider=sky.Local(), display="log") as pool:
    talk(texts) >> pool
    for text in texts:
        try:
            fail(text) >> pool
        except ValueError as error:
            assert error.args == (text,), error.args
    try:
        die(texts) >> pool
    except sky.CallCrashed as error:
        print(error)
    print("last")
"""


def test_a_hostile_text_of_a_call_acts_on_no_terminal(tmp_path: Path) -> None:
    """Printed and logged texts, the last output of a call that dies, and names of metrics are visible, and each line
    has its mark. The arguments of an exception arrive as they were raised.
    """
    import json

    program, texts = tmp_path / "program.py", tmp_path / "texts.json"
    program.write_text(PROGRAM)
    texts.write_text(json.dumps(list(HOSTILE_TEXTS.values())))
    done = subprocess.run([sys.executable, program, texts], capture_output=True, cwd=tmp_path, check=False)
    output, shown = done.stdout.decode(), done.stderr.decode()
    assert (done.returncode, output.rstrip().endswith("last")) == (0, True), shown
    refuse_lines_of_ours(output)
    refuse_lines_of_ours(shown)
    assert all(line.startswith(("skyward  ", "[node 0] ", "  ")) for line in shown.split("\n") if line)
    for words in (
        "a\\x1b[2J\\x1b[Hb",
        "\\x1b]52;c;cm0gLXJmIH4=\\x07",
        "safe\\u202eexe.txt",
        "a\\udc80\\ud800b",
        "a\\x00b",
    ):
        assert shown.count(f"[node 0] {words}") >= 1
    assert "[node 0] skyward  forged" in shown
