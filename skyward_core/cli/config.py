"""`skyward config show`, `skyward config schema` and `skyward doctor`: what is set, and what works here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, provider_from
from skyward_core.cli.printing import FAILED, print_json, print_table, print_warnings, say

if TYPE_CHECKING:
    from skyward_core.config.report import Configuration, Value
    from skyward_core.doctor import Check

UNSET = "-"


def show(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    profile: Annotated[
        str | None,
        typer.Option(parser=values.name, metavar="NAME", help="a profile of skyward.toml (default: SKYWARD_PROFILE)"),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(parser=values.name, metavar="NAME", help="for the pool with this name")
    ] = None,
) -> int:
    """Show each setting, and where its value comes from. Values of secrets are masked."""
    from skyward_core.config.report import configuration

    found = configuration(profile=profile, pool=pool, ledger_url=context.obj)
    if as_json:
        print_json(_settings_json(found))
    else:
        print_table(*_settings_table(found))
        say(_settings_summary(found))
    return print_warnings([found.fault] if found.fault else [])


def schema() -> int:
    """Print the JSON schema of skyward.toml, with which editors complete and check it."""
    from skyward_core.config.report import settings_schema

    print_json(settings_schema())
    return 0


def doctor(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            parser=values.printable,
            metavar="NAME",
            help="a provider to check; may be repeated (default: those of the settings)",
        ),
    ] = None,
    limit: Annotated[
        float, typer.Option(parser=values.seconds, metavar="SECONDS", help="the most that one check may take")
    ] = 20.0,
) -> int:
    """Check settings, ledger, keys, clouds and orchestrators, and say what to do. Rents nothing."""
    from skyward_core.doctor import diagnose

    given = None if provider is None else [provider_from(text) for text in provider]
    checks = diagnose(providers=given, ledger_url=context.obj, limit_seconds=limit)
    if as_json:
        print_json(_checks_json(checks))
    else:
        print_table(*_checks_table(checks))
        say(_checks_summary(checks))
    return FAILED if _has_failed(checks) else 0


def _settings_json(found: Configuration) -> dict[str, Any]:
    return {
        "file": found.file,
        "profiles": list(found.profiles),
        "pools": list(found.pools),
        "settings": [_setting_json(one) for one in found.values],
        "others": [_setting_json(one) for one in found.others],
        "fault": found.fault or None,
    }


def _setting_json(one: Value) -> dict[str, Any]:
    return {"name": one.name, "value": one.value, "source": one.source.value, "where": one.where or None}


def _settings_table(found: Configuration) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the settings of a pool, then the others."""
    return ["SETTING", "VALUE", "FROM"], [_setting_row(one) for one in (*found.values, *found.others)]


def _setting_row(one: Value) -> list[str]:
    return [one.name, _value_text(one.value), one.where or one.source.value]


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):  # an image has many empty fields
        fields = cast("Mapping[str, Any]", value)
        value = {name: one for name, one in fields.items() if one not in (None, [], {}, False)}
    return UNSET if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _settings_summary(found: Configuration) -> str:
    """Return which file was read, and the names of its tables."""
    if found.file is None:
        return "there is no skyward.toml here, nor in the folders above, nor in your configuration folder"
    names = [
        f"{kind}: {', '.join(names)}" for kind, names in (("profiles", found.profiles), ("pools", found.pools)) if names
    ]
    return "; ".join([f"read: {found.file}", *names])


def _checks_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(check) | {"state": check.state.value, "cure": check.cure or None} for check in checks]


def _checks_table(checks: Sequence[Check]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows. A cure has its own row below its check."""
    rows: list[list[str]] = []
    for check in checks:
        rows.append([check.state.value, check.subject, " ".join(check.message.split())])
        if check.cure:
            rows.append(["", "", f"what to do: {' '.join(check.cure.split())}"])
    return ["STATE", "CHECK", "FOUND"], rows


def _checks_summary(checks: Sequence[Check]) -> str:
    """Return how many checks ended how."""
    states = [check.state.value for check in checks]
    return ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warning", "failed") if state in states)


def _has_failed(checks: Sequence[Check]) -> bool:
    return any(check.state.value == "failed" for check in checks)
