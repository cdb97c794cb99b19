"""The help, its examples, and the words of other programs that are answered with ours."""

import re
import shlex
from typing import Any

import pytest

from skyward_core import cli
from skyward_core.cli.app import command_tree
from skyward_core.cli.words import EXAMPLES, OTHER_COMMANDS, OTHER_OPTIONS, option_hint
from skyward_core.spec import OTHER_NAMES
from tests.cli.ledger import Skyward
from tests.cli.lines import all_commands, lines_of_the_pages, understood

COMMANDS = dict(all_commands(command_tree()))
GROUPS = ["Run:", "Look:", "Money:", "Clean up:", "Set up:"]


def help_of(path: str, capsys: pytest.CaptureFixture[str]) -> str:
    cli.main([*path.split(), "--help"])
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


@pytest.mark.parametrize("path", COMMANDS)
def test_each_help_ends_with_an_example_that_the_page_has(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser accepts it as this command, or as one of this group, on one line that can be copied."""
    last = help_of(path, capsys).splitlines()[-1]
    assert last == f"  Example: {EXAMPLES[path]}"
    words = shlex.split(EXAMPLES[path])
    assert words[0] == "skyward"
    assert f"{understood(command_tree(), words[1:])} ".startswith(f"{path} ".lstrip())
    assert any(shlex.split(f"skyward {line}", comments=True) == words for line in lines_of_the_pages())


def test_no_example_is_of_a_command_that_is_not_there() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()


def test_the_help_has_all_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of("", capsys).splitlines()
    begins = lines.index(GROUPS[0])
    assert [line for line in lines[begins:] if re.fullmatch(r"\S.*:", line)] == GROUPS
    shown = [line.split()[0] for line in lines[begins:-1] if re.match(r"  \S", line)]
    assert sorted(shown) == sorted(COMMANDS[""].commands)


@pytest.mark.parametrize("path", ["", "budget", "ledger", "config"])
def test_a_group_without_a_command_prints_its_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout, as success: so does docker."""
    assert cli.main(path.split()) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == (help_of(path, capsys), "")


# ── words of other programs ──────────────────────────────────────────────────────────────────────────────────────────

ALL_WORDS = [(group, word) for group, words in OTHER_COMMANDS.items() for word in words]


@pytest.mark.parametrize(("group", "word"), ALL_WORDS)
def test_a_command_of_another_program_is_answered(group: str, word: str, skyward: Skyward) -> None:
    """With one line and exit code 2. What it says to write is a command line that the parser accepts."""
    typed = f"{group} {word}".split()
    answer = skyward.refused([*typed, "mycluster", "--anything"])
    path = " ".join(["skyward", *group.split()])
    assert answer == f"{path}: error: there is no command {word!r}: write {OTHER_COMMANDS[group][word]}\n"
    assert word not in COMMANDS[group].commands
    for line in re.findall(r"`skyward ([^`]+)`", answer):
        if line not in {"--help", "--version"}:
            understood(command_tree(), shlex.split(line))


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("stpo nightly", "skyward: error: there is no command 'stpo': did you mean 'stop'?"),
        ("LS", "skyward: error: there is no command 'LS': write `skyward ps`"),
        ("cost_report", "skyward: error: there is no command 'cost_report': write `skyward cost`"),
        ("budget lst", "skyward budget: error: there is no command 'lst': did you mean 'list'?"),
        ("offers --gpu H100", "skyward offers: error: there is no option --gpu: write --accelerator A100"),
        ("run --gpus 4 train.py", "skyward run: error: there is no option --gpus: write --accelerator 4xA100"),
        ("run --gpus=4 train.py", "skyward run: error: there is no option --gpus: write --accelerator 4xA100"),
        ("run --num-nodes 2 x.py", "skyward run: error: there is no option --num-nodes: write --nodes 2"),
        ("run --max-nodes 8 x.py", "skyward run: error: there is no option --max-nodes: write --set 'nodes=[1, 8]'"),
        (
            "run --instance-type p5.48xlarge x.py",
            "skyward run: error: there is no option --instance-type: write --set machine=p5.48xlarge",
        ),
        (
            "run --region us-east-1 x.py",
            """skyward run: error: there is no option --region: write --provider '{"name": "aws", "region": "us-east-1"}'""",
        ),
        ("run --cloud aws x.py", "skyward run: error: there is no option --cloud: write --provider aws"),
        ("run --use-spot x.py", "skyward run: error: there is no option --use-spot: write --set spot=always"),
        ("run --keep-warm 60 x.py", "skyward run: error: there is no option --keep-warm: write --set keep_warm=VALUE"),
        (
            "run --apt curl x.py",
            "skyward run: error: there is no option --apt: it is the image's: write --set 'image={\"apt\": ...}'",
        ),
        (
            "run --acelerator A100 x.py",
            "skyward run: error: there is no option --acelerator: did you mean '--accelerator'?",
        ),
        ("ps --output json", "skyward ps: error: there is no option --output: write --json"),
        ("sweep -y", "skyward sweep: error: there is no option -y: write --yes"),
    ],
)
def test_the_nearest_word_of_ours_is_named(line: str, answer: str, skyward: Skyward) -> None:
    assert skyward.refused(shlex.split(line)) == f"{answer}\n"


@pytest.mark.parametrize("line", ["xyzzy", "'\x1b[2J'", "ps --xyzzy", "ps --gpu", "ps '--\x1b[2J'"])
def test_a_word_that_nobody_knows_is_refused_with_the_usage(line: str, skyward: Skyward) -> None:
    usage, error = skyward.refused(shlex.split(line)).splitlines()
    assert usage.startswith("Usage: skyward")
    assert error.startswith(f"skyward{' ps' if line.startswith('ps') else ''}: error: there is no ")
    assert error.isprintable()


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_each_other_name_of_a_field_is_answered_as_an_option_of_run(name: str) -> None:
    """Each name that `ComputePool` answers. The parser accepts the answer."""
    options = [text for option in COMMANDS["run"].params for text in option.opts]
    hint = option_hint(f"--{name.replace('_', '-')}", options)
    assert hint.startswith("write --")
    assert understood(command_tree(), ["run", *shlex.split(hint.removeprefix("write ")), "x.py"]) == "run"


def test_an_option_of_another_program_is_none_of_ours(skyward: Skyward) -> None:
    """Only where the command has the option that is named instead."""
    named: set[Any] = {text for command in COMMANDS.values() for option in command.params for text in option.opts}
    assert named >= set(OTHER_OPTIONS.values())
    assert "did you mean" not in (answer := skyward.refused(["stop", "x", "-y"]))
    assert "Usage: " in answer
