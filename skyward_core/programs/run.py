"""Runs a program on a pool that is there for it alone, or that has a name: from opening to the exit code."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any, cast

from skyward_core.config.settings import Settings
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import CallCrashed, RemoteError, SkywardError
from skyward_core.pool.pool import ComputePool
from skyward_core.programs.interruption import Interrupted, interruptible
from skyward_core.programs.output import ProgramOutput
from skyward_core.programs.target import Program
from skyward_core.spec import PoolSpec
from skyward_core.work import Work
from skyward_core.worker.script import BY_SIGNAL

FAILED = 1


def spec_of(fields: Mapping[str, Any], *, profile: str | None = None) -> PoolSpec:
    """Return the spec of a program's pool: these fields, and below them the settings with a profile.

    Raises BadRequest.
    """
    settings = Settings.read(profile=profile, pool=fields.get("name"))
    return PoolSpec.of(**cast("Any", {**settings.fields, **fields, "display": "quiet"}))


def run_program(program: Program, spec: PoolSpec, output: ProgramOutput, *, everywhere: bool = False) -> int:
    """Run a program once, or on every worker (`everywhere`); return its exit code when its machines have ended.

    A pool with a name is left as any other of its users leaves it. Of several exit codes it is the first that is not
    zero; then the other workers are stopped. Raises errors of the pool, and `Interrupted` after a signal.
    """
    pool = ComputePool.from_spec(spec, on_event=output, work=Work(system="skyward", workflow=program.name))
    what_ends = "its machines end" if spec.name is None else f"the pool {spec.name} is left"
    try:
        with output.warnings(), interruptible(output.report, pool.terminate_now, what_ends), pool:
            return _exit_code(pool, program, output, everywhere=everywhere)
    except Interrupted as interrupted:
        output.report("stopped")
        return interrupted.exit_code


def _exit_code(pool: ComputePool, program: Program, output: ProgramOutput, *, everywhere: bool) -> int:
    try:
        if everywhere and program.call.forms_group:
            values: list[Any] = list(pool.broadcast(program.call))
        else:
            futures = pool.submit_broadcast(program.call) if everywhere else [pool.submit(program.call)]
            values = _values(futures, is_script=program.is_script)
    except CallCrashed as error:
        if error.exit_code == 0:  # sys.exit() in a function
            return 0
        output.text(str(error), is_error=True)
        return _as_in_a_shell(error.exit_code)
    except RemoteError as error:
        output.text(str(error), is_error=True)
        return FAILED
    except SkywardError:
        raise
    except Exception as error:  # the function's own
        output.text(str(error.__cause__ or f"{type(error).__name__}: {error}"), is_error=True)
        return FAILED
    if program.is_script:
        return next((code for code in values if code), 0)
    for value in values:
        if value is not None:
            output.text(str(value), is_error=False)
    return 0


def _values(futures: list[CallFuture[Any]], *, is_script: bool) -> list[Any]:
    """Wait for all calls; when one of them fails, stop the others.

    Raises the error of the first that has failed.
    """
    done: queue.SimpleQueue[CallFuture[Any]] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(cast("Any", done.put))
    failed: BaseException | None = None
    for _ in futures:
        future = done.get()
        try:
            has_failed = is_script and future.result() != 0
        except CancelledError:
            continue
        except Exception as error:
            failed, has_failed = failed or error, True
        if has_failed:
            for other in futures:
                other.cancel()
    if failed is not None:
        raise failed
    return [future.result() for future in futures if not future.cancelled()]


def _as_in_a_shell(exit_code: int | None) -> int:
    return FAILED if exit_code is None else exit_code if exit_code >= 0 else BY_SIGNAL - exit_code
