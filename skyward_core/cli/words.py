"""What help and errors of the command line say: an example of each command, and our words for those of peers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection

EXAMPLES = {
    "": "skyward run train.py --epochs 3",
    "run": "skyward run --accelerator 8xH100 --nodes 4 --everywhere --pip torch --max-cost 50 train.py --epochs 3",
    "ssh": "skyward ssh nightly 1",
    "cp": "skyward cp nightly:1:out/model.pt .",
    "warm": "skyward warm nightly --for 2h",
    "ps": "skyward ps --all --limit 20",
    "top": "skyward top --once",
    "ui": "skyward ui --port 8811",
    "logs": "skyward logs nightly -f",
    "calls": "skyward calls nightly --stacks",
    "metrics": "skyward metrics nightly",
    "stacks": "skyward stacks nightly",
    "why": "skyward why sky-7f21c0ffee42",
    "dashboard": "skyward dashboard nightly",
    "offers": "skyward offers --cpu 16 --memory 64GB --architecture x86_64 --json",
    "quote": "skyward quote dags/",
    "cost": "skyward cost --by task --since 30d",
    "receipt": "skyward receipt sky-7f21c0ffee42",
    "users": "skyward users nightly",
    "budget": "skyward budget set team-a --limit 200 --per day",
    "budget set": "skyward budget set team-a --limit 200 --per day",
    "budget list": "skyward budget list",
    "budget remove": "skyward budget remove team-a",
    "stop": "skyward stop sky-7f21c0ffee42",
    "sweep": "skyward sweep --yes",
    "cache": "skyward cache",
    "cache prune": "skyward cache prune --older-than 30d --yes",
    "doctor": "skyward doctor --provider aws",
    "config": "skyward config show --profile large --pool nightly",
    "config show": "skyward config show --profile large --pool nightly",
    "config schema": "skyward config schema",
    "ledger": "skyward ledger backup /backup/ledger.db",
    "ledger backup": "skyward ledger backup /backup/ledger.db",
    "ledger restore": "skyward ledger restore /backup/ledger.db",
    "ledger migrate": "skyward ledger migrate",
    "ledger prune": "skyward ledger prune --older-than 90d",
}
"""A command line for each command and group; docs/commands.md or a page of docs/commands/ has it."""

_PS, _STOP, _RUN, _COST = "`skyward ps`", "`skyward stop POOL`", "`skyward run SCRIPT`", "`skyward cost`"
_OFFERS, _RECEIPT, _CALLS = "`skyward offers`", "`skyward receipt POOL`", "`skyward calls POOL`"
_EXEC = "`skyward run --pool NAME -- COMMAND`, or `skyward ssh POOL` to log in"
_SET, _LIST = "`skyward budget set NAME --limit 200 --per day`", "`skyward budget list`"
_SHOW, _PRUNE = "`skyward config show`", "`skyward cache prune`"

OTHER_COMMANDS: dict[str, dict[str, str]] = {
    "": {
        **dict.fromkeys(("status", "list", "ls", "pools", "clusters", "nodes", "get"), _PS),
        **dict.fromkeys(("down", "kill", "rm", "delete", "remove", "terminate", "destroy", "cancel", "end"), _STOP),
        **dict.fromkeys(("launch", "up", "start", "submit", "create", "apply"), _RUN),
        **dict.fromkeys(("queue", "jobs"), _CALLS),
        **dict.fromkeys(("cost-report", "costs", "bill", "billing", "spend"), _COST),
        **dict.fromkeys(("show-gpus", "gpus", "gpu", "accelerators", "prices", "catalog"), _OFFERS),
        **dict.fromkeys(("inspect", "describe", "show"), _RECEIPT),
        "exec": _EXEC,
        "shell": "`skyward ssh POOL`",
        **dict.fromkeys(("scp", "rsync", "copy"), "`skyward cp SOURCE POOL:PATH`"),
        **dict.fromkeys(("tail", "attach"), "`skyward logs POOL -f`"),
        "stats": "`skyward metrics POOL`",
        "history": "`skyward ps --all`",
        "autostop": "`skyward warm NAME --for 2h`",
        "check": "`skyward doctor`",
        **dict.fromkeys(("clean", "cleanup", "gc"), "`skyward sweep`"),
        "prune": "`skyward sweep` for machines, or `skyward cache prune` for files of this computer",
        **dict.fromkeys(("settings", "profile", "profiles"), _SHOW),
        **dict.fromkeys(("accounts", "budgets"), _LIST),
        "version": "`skyward --version`",
        "help": "`skyward --help`",
    },
    "budget": {
        **dict.fromkeys(("add", "create", "new", "update"), _SET),
        **dict.fromkeys(("ls", "show", "status"), _LIST),
        **dict.fromkeys(("rm", "delete"), "`skyward budget remove NAME`"),
    },
    "config": dict.fromkeys(("list", "ls", "get", "view"), _SHOW),
    "cache": {
        **dict.fromkeys(("clear", "clean", "rm", "purge"), _PRUNE),
        **dict.fromkeys(("list", "ls", "show"), "`skyward cache`"),
    },
}
"""Words of other programs for a command, by the group in which they are written, and what to write here."""

OTHER_OPTIONS = {
    "--output": "--json",
    "-o": "--json",
    "--format": "--json",
    "-y": "--yes",
    "--force": "--yes",
    "-a": "--all",
    "-n": "--limit",
}
"""Words of other programs for options that are no fields of a pool."""


def command_hint(group: str, word: str, commands: Collection[str]) -> str:
    """Return what to write for a word that is no command of a group, "" where nothing is near.

    >>> command_hint("", "status", ["ps", "stop"]), command_hint("", "stpo", ["ps", "stop"])
    ('write `skyward ps`', "did you mean 'stop'?")
    """
    if (answer := OTHER_COMMANDS.get(group, {}).get(word.replace("_", "-").casefold())) is not None:
        return f"write {answer}"
    return _question(word, commands)


def option_hint(option: str, options: Collection[str]) -> str:
    """Return what to write for an option that is not among a command's `options`; "" where nothing is near.

    >>> option_hint("--gpus", ["--accelerator"]), option_hint("--keep-warm", ["--set"]), option_hint("--gpu", ["--all"])
    ('write --accelerator 4xA100', 'write --set keep_warm=VALUE', '')
    """
    if (ours := OTHER_OPTIONS.get(option)) in options:
        return f"write {ours}"
    return (_field_hint(option, options) if option.startswith("--") else "") or _question(option, options)


def _question(word: str, words: Collection[str]) -> str:
    """As `question`, also for words that are so short that one wrong letter is much of them."""
    from difflib import get_close_matches

    from skyward_core.errors import question

    near = get_close_matches(word, words, 1)
    return question(word, words) or (f"did you mean {near[0]!r}?" if near else "")


def _field_hint(option: str, options: Collection[str]) -> str:
    """Return the option for a field of a pool, by its name here or in another library (`OTHER_NAMES`)."""
    from skyward_core.image.image import Image
    from skyward_core.spec import OTHER_NAMES, PoolSpec

    name = option.removeprefix("--").replace("-", "_")
    if name in OTHER_NAMES:
        return _typed(OTHER_NAMES[name], options)
    if "--set" not in options:
        return ""
    if name in PoolSpec.model_fields:
        return f"write --set {name}=VALUE"
    if name in Image.model_fields:
        return f"it is the image's: write --set {shlex.quote(f'image={{"{name}": ...}}')}"
    return ""


def _typed(python: str, options: Collection[str]) -> str:
    """Return how a keyword of `ComputePool` is typed: `nodes=2` is `--nodes 2`, or `--set nodes=2`; "" for neither."""
    if nested := re.search(r'(\w+)=sky\.(\w+)\((\w+)="([^"]*)"\)', python):
        field, kind, name, value = nested.groups()
        text = json.dumps({"name": kind.casefold(), name: value})
        is_plain = False
    else:
        typed = re.match(r'(\w+)=(?:"([^"]*)"|(\d+)|([(\[].*?[)\]]))', python)
        if typed is None:
            return ""
        field, text = typed[1], typed[2] or typed[3] or f"[{typed[4][1:-1]}]"
        is_plain = typed[4] is None
    own = f"--{field.replace('_', '-')}"
    if own in options and (is_plain or nested):
        return f"write {own} {shlex.quote(text)}"
    return f"write --set {shlex.quote(f'{field}={text}')}" if "--set" in options else ""
