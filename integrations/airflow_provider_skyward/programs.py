"""`SkywardRunOperator`: a task that runs a command or a script, in place of a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from airflow.sdk.exceptions import AirflowSkipException

import skyward_core as sky
from airflow_provider_skyward.operators import SkywardOperator, names_pool_keywords
from airflow_provider_skyward.task_attempt import TaskAttempt

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_skyward.keyword_types import ProgramKeywords

SKIP_ON_EXIT_CODE = 99
"""That of Airflow's BashOperator."""
_OF_FUNCTIONS = ("python_callable", "op_args", "op_kwargs", "map_over", "templates_dict", "templates_exts")
_OF_THIS = ("command", "script", "args", "files")


class SkywardRunOperator(SkywardOperator):
    """Run a command or a Python script on a pool of machines that lives as long as the task.

    `command` is a text for bash, or a list with a program and its arguments. `script` is a Python file; the modules of
    its project that it imports travel with it, as with `skyward run`, and `args` are its arguments. `files` are files
    and folders that travel too: they keep their place relative to the script, or to the DAG file if a command runs,
    which begins there. Relative paths begin at the folder of the DAG file. All four are templates.

    What the program prints is the task's log, and its exit code decides: 0 is success, and the task's result; one in
    `skip_on_exit_code` (a number or several, None for none; 99 by default, as in BashOperator) skips the task; any
    other one fails it with `CallCrashed`. With `broadcast` the program runs on each worker, and finds RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun.

    Takes the keywords of `SkywardOperator` but for those of functions. Raises BadRequest while the DAG is parsed.

        SkywardRunOperator(task_id="train", script="train.py", args=["--day", "{{ ds }}"], accelerator="A100")
    """

    template_fields: Collection[str] = (*_OF_THIS, *SkywardOperator.template_fields)

    @names_pool_keywords
    def __init__(
        self,
        *,
        command: str | Sequence[str] | None = None,
        script: str | None = None,
        args: Sequence[Any] = (),
        files: Sequence[str] = (),
        skip_on_exit_code: int | Collection[int] | None = SKIP_ON_EXIT_CODE,
        **kwargs: Unpack[ProgramKeywords],
    ) -> None:
        if wrong := [name for name in _OF_FUNCTIONS if name in kwargs]:
            raise sky.BadRequest(f"{wrong[0]} is for functions, which SkywardOperator runs: leave it out")
        if (command is None) == (script is None):
            raise sky.BadRequest("write command= or script=, one of them")
        if args and script is None:
            raise sky.BadRequest("args= are those of a script: write them into the command")
        super().__init__(python_callable=_no_function, **cast("dict[str, Any]", kwargs))
        self.command, self.script, self.args, self.files = command, script, args, files
        codes = () if skip_on_exit_code is None else skip_on_exit_code
        self.skip_on_exit_code = (codes,) if isinstance(codes, int) else tuple(codes)

    def _calls(self, context: Context) -> list[sky.PendingCompute[Any]]:
        files, folder = [*self.files], self._folder()
        if self.script is not None:
            return [sky.script_call(self.script, [str(arg) for arg in self.args], files=files, folder=folder)]
        assert self.command is not None
        return [sky.command_call(self.command, files=files, folder=folder)]

    def _folder(self) -> Path:
        """Return where relative paths begin: the folder of the DAG file, as it lies on this worker."""
        return Path(self.dag.folder if self.has_dag() else ".")

    def _finished(self, attempt: TaskAttempt, run: Callable[[], list[Any]], context: Context) -> Any:
        try:
            return super()._finished(attempt, run, context)
        except sky.CallCrashed as error:
            if error.exit_code in self.skip_on_exit_code:
                raise AirflowSkipException(f"{error}, which is in skip_on_exit_code") from error
            raise


def _no_function() -> None:
    """What a command calls: nothing."""
