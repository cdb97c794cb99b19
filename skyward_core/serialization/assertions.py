"""What the assertions of a module that pytest has rewritten call, for nodes without pytest.

pytest changes each `assert` of a test module into code that calls its helpers to show the values. A function of
such a module travels with these in their place. The text of an error is pytest's, without what its plugins add.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence

SHOWN_CHARACTERS = 240
PYTEST_HELPERS = "_pytest.assertion.rewrite"
"""pytest's module of helpers. A rewritten module has it as the global "@pytest_ar"."""


def helpers() -> types.SimpleNamespace:
    """Return the helpers under the names that rewritten code uses (pytest 8 and 9, `AssertionRewriter`)."""
    return types.SimpleNamespace(
        _saferepr=_shown,
        _format_assertmsg=_message,
        _format_explanation=_explanation,
        _format_boolop=_joined,
        _call_reprcompare=_first_that_failed,
        _should_repr_global_name=_has_no_name,
        _check_if_assertion_pass_impl=lambda: False,
        _call_assertion_pass=lambda *_: None,
    )


def _shown(obj: object) -> str:
    if isinstance(obj, types.MethodType):
        return obj.__name__
    try:
        text = repr(obj)
    except Exception as error:  # the user's own code: the assertion is shown anyway
        text = f"<{type(error).__name__} in the repr of {type(obj).__name__}>"
    if len(text) > SHOWN_CHARACTERS:
        begin = (SHOWN_CHARACTERS - 3) // 2
        text = f"{text[:begin]}...{text[begin + 3 - SHOWN_CHARACTERS :]}"
    return text.replace("\n", "\\n")


def _message(obj: object) -> str:
    text = obj if isinstance(obj, str) else _shown(obj).replace("\\n", "\n")
    return text.replace("\n", "\n~").replace("%", "%%")


def _joined(explanations: Iterable[str], is_or: bool) -> str:
    return f"({(' or ' if is_or else ' and ').join(explanations)})".replace("%", "%%")


def _first_that_failed(
    _operators: Sequence[str], results: Sequence[object], explanations: Sequence[str], _objects: Sequence[object]
) -> str:
    for result, explanation in zip(results, explanations, strict=True):
        try:
            if not result:
                return explanation
        except Exception:  # an array has no truth value: this comparison is the one
            return explanation
    return explanations[-1]


def _has_no_name(obj: object) -> bool:
    return not callable(obj) and not hasattr(obj, "__name__")


def _explanation(text: str) -> str:
    r"""Return the text for people: "\n{" begins what explains a part of the line before, "\n}" ends it."""
    lines, open_lines, parts = [""], [0], [0]
    for number, line in enumerate(text.split("\n")):
        mark, rest = line[:1], line[1:]
        if number == 0:
            lines[0] = line
        elif mark == "{":
            lines.append(f" +{'  ' * len(open_lines)}{'and   ' if parts[-1] else 'where '}{rest}")
            parts[-1] += 1
            open_lines.append(len(lines) - 1)
            parts.append(0)
        elif mark == "}":
            open_lines.pop()
            parts.pop()
            lines[open_lines[-1]] += rest
        elif mark in ("~", ">"):
            open_lines[-1] += 1
            lines.append("  " * (len(open_lines) - (mark == ">")) + rest)
        else:
            lines[-1] += f"\\n{line}"
    return "\n".join(lines)
