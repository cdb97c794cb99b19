"""What the tasks of an orchestrator would ask for, as its plugin reads it from their definitions: for `skyward quote`.

A plugin is a function of the entry-point group `skyward.quotes`. It takes the target that a user has typed, such as a
folder of DAGs. It returns a Plan, or None if such a target is not its own. It runs no task and rents nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from skyward_core.errors import BadRequest, SkywardError
from skyward_core.spec import PoolSpec

ENTRY_POINTS = "skyward.quotes"


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task that opens a pool, before any run of it.

    `spec` is that of its pool; None if it is not known before a run, and then `reason` says why. After
    `timeout_seconds` the orchestrator ends a try of the task, and the pool with it; None if it never does. `tries` is
    how often one run may try it. `instances` is how many such tasks one run has; None if only the run knows.
    """

    workflow: str
    task: str
    spec: PoolSpec | None
    reason: str = ""
    timeout_seconds: float | None = None
    tries: int = 1
    instances: int | None = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The tasks of a target that open pools. `warnings` say what could not be read, such as a file with a fault."""

    tasks: tuple[PlannedTask, ...] = ()
    warnings: tuple[str, ...] = ()


def plans_of(target: str) -> dict[str, Plan]:
    """Return the plan of each orchestrator whose plugin knows the target, by the plugin's name.

    Raises BadRequest if none does.
    """
    found, absent = dict[str, Plan](), list[str]()
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            plan = _plan(entry, target)
        except ImportError as error:  # the plugin is a part of a distribution whose orchestrator is not installed
            absent.append(f"{entry.name} cannot be imported ({error})")
        else:
            if plan is None:
                absent.append(f"{entry.name} does not know it")
            else:
                found[entry.name] = plan
    if not found:
        raise BadRequest(
            f"no orchestrator reads {target!r}: {'; '.join(absent) or 'none is installed'}. Name a folder or a file of"
            " DAGs of Airflow; docs/commands.md lists what else can be named"
        )
    return found


def _plan(entry: EntryPoint, target: str) -> Plan | None:
    planner: Callable[[str], Plan | None] = entry.load()
    try:
        return planner(target)
    except (SkywardError, ImportError):
        raise
    except Exception as error:  # the definitions are programs of the user, and so may raise anything
        raise BadRequest(f"{entry.name} cannot read {target!r}: {type(error).__name__}: {error}") from error
