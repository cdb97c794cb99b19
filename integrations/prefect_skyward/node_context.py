"""Prefect's context around a call on a node (docs/decisions/0038-prefect-s-context-on-nodes.md).

This file travels as text: a node has Prefect, and no `prefect_skyward`. A process of calls runs one call at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, aclosing, contextmanager, suppress
from contextvars import copy_context
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, cast
from uuid import UUID, uuid4

import prefect.settings
from prefect import Flow, Task, tags
from prefect._internal.concurrency import threads as prefect_threads
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.context import FlowRunContext, SettingsContext, TaskRunContext
from prefect.events.worker import EventsWorker
from prefect.futures import PrefectConcurrentFuture
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.results import ResultStore, resolve_result_storage
from prefect.settings import Profile, Settings
from prefect.task_engine import run_task_async, run_task_sync
from prefect.task_runners import TaskRunner
from prefect.utilities.callables import get_call_parameters

STOP_SECONDS = 1.0
"""How long nested task runs have to end, before the process does: between SIGTERM and SIGKILL are two seconds."""
FLUSH_SECONDS = 10.0
LATE_FLUSH_SECONDS = 0.5
"""The same for a call that was stopped."""


class CallStopped(BaseException):
    """The call was cancelled, or its time is up; or, in a nested task run, the call around it has ended."""


def run(fn: Callable[..., Any], facts: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in the context that `facts` describe (`prefect_context.facts_of_call` makes them)."""
    if inspect.isasyncgenfunction(fn):
        return _asynchronous_items(fn, facts, args, kwargs)
    if inspect.isgeneratorfunction(fn):
        return _items(fn, facts, args, kwargs)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with _context(fn, facts, args, kwargs):
            value = fn(*args, **kwargs)
            return asyncio.run(value) if inspect.iscoroutine(value) else value
    except CallStopped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def _items(fn: Callable[..., Any], facts: Mapping[str, Any], args: Any, kwargs: Any) -> Generator[Any]:
    with _context(fn, facts, args, kwargs):
        yield from fn(*args, **kwargs)


async def _asynchronous_items(
    fn: Callable[..., Any], facts: Mapping[str, Any], args: Any, kwargs: Any
) -> AsyncGenerator[Any]:
    with _context(fn, facts, args, kwargs):
        async with aclosing(fn(*args, **kwargs)) as items:
            async for item in items:
                yield item


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SIGKILL follows
    raise CallStopped


@contextmanager
def _context(fn: Callable[..., Any], facts: Mapping[str, Any], args: Any, kwargs: Any) -> Generator[None]:
    is_stopped = False
    with ExitStack() as stack:
        stack.callback(lambda: _end_services(LATE_FLUSH_SECONDS if is_stopped else FLUSH_SECONDS))
        stack.enter_context(SettingsContext(profile=Profile(name="skyward"), settings=_settings(_key())))
        _send_records_to_stdout(facts.get("task_run_id", ""), facts["log_levels"])
        client = _client(_key())
        if facts["flow_run"]:
            runner = stack.enter_context(NodeTaskRunner())
            stack.enter_context(_flow_run_context(facts, client, runner))
        if facts["task_run"]:
            stack.enter_context(_task_run_context(fn, facts, args, kwargs, client))
        stack.enter_context(tags(*facts["tags"]))
        try:
            yield
        except BaseException as error:
            is_stopped = not isinstance(error, Exception)
            raise


def _flow_run_context(facts: Mapping[str, Any], client: Any, runner: NodeTaskRunner) -> FlowRunContext:
    flow_run = FlowRun.model_validate_json(facts["flow_run"])
    return FlowRunContext(
        flow=_flow(facts["flow_name"], facts["flow_version"]),
        flow_run=flow_run,
        parameters=flow_run.parameters,
        client=client,
        task_runner=runner,
        result_store=_result_store(facts["result_storage"]),
        persist_result=facts["flow_persists"],
        log_prints=facts["flow_log_prints"],
        detached=True,
    )


def _task_run_context(
    fn: Callable[..., Any], facts: Mapping[str, Any], args: Any, kwargs: Any, client: Any
) -> TaskRunContext:
    task = Task(fn=fn, name=facts["task_name"], version=facts["task_version"], tags=facts["task_tags"])
    task.task_key = facts["task_key"]
    return TaskRunContext(
        task=task,
        task_run=TaskRun.model_validate_json(facts["task_run"]),
        parameters=get_call_parameters(fn, args, kwargs),
        client=client,
        result_store=_result_store(facts["result_storage"]),
        persist_result=facts["task_persists"],
        log_prints=facts["task_log_prints"],
    )


@lru_cache(maxsize=8)
def _flow(name: str, version: str | None) -> Flow[Any, Any]:
    def body() -> None:
        raise RuntimeError("the flow runs in its own process, and not on a node")

    return Flow(fn=body, name=name, version=version or "unknown")


def _result_store(block_id: str) -> ResultStore:
    """The flow's storage, if it is a saved block; else this machine's disk."""
    return ResultStore(result_storage=_storage(block_id)) if block_id else ResultStore()


@lru_cache(maxsize=8)
def _storage(block_id: str) -> Any:
    return cast(Any, resolve_result_storage)(UUID(block_id), _sync=True)


def _key() -> tuple[tuple[str, str], ...]:
    """What Prefect's settings depend on: the secrets come with the first call, after a preloaded Prefect."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("PREFECT_")))


@lru_cache(maxsize=4)
def _settings(_: object) -> Settings:
    settings = Settings()
    # records travel with the output of the call, and reach the API once
    return settings.copy_with_update(updates={prefect.settings.PREFECT_LOGGING_TO_API_ENABLED: False})


@lru_cache(maxsize=4)
def _client(_: object) -> Any:
    return get_client(sync_client=True)


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Records(logging.StreamHandler[Any]):
    """Prints the records of runs. The core carries each as one line with its level, as those of any handler.

    Before a record of another run than the call's there are the run's names: `ui.RunLogs` reads them.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.task_run_id = ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        task_run_id, flow_run_id = (str(getattr(record, name, None) or "") for name in ("task_run_id", "flow_run_id"))
        if not flow_run_id or (task_run_id and task_run_id == self.task_run_id):
            return text
        kind = "task" if task_run_id else "flow"
        names = {
            name: str(getattr(record, name, ""))
            for name in ("task_run_id", "task_run_name", "task_name", "flow_run_id", "flow_run_name", "flow_name")
        }
        return f"[{kind} run {json.dumps(names)}] {text}"


def _send_records_to_stdout(task_run_id: str, levels: Mapping[str, int]) -> None:
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, PrefectConsoleHandler)]:
        root.removeHandler(handler)  # the import of Prefect has put it there, for all records of the process
    for name in ("prefect.task_runs", "prefect.flow_runs", "prefect"):
        logger = logging.getLogger(name)
        logger.propagate = False
        if not any(isinstance(one, _Records) for one in logger.handlers):
            logger.handlers[:] = [_records]
    for name, level in levels.items():  # the import of Prefect has set others
        logging.getLogger(name).setLevel(level)
    _records.task_run_id = task_run_id


_records = _Records()


# ── nested task runs ─────────────────────────────────────────────────────────────────────────────────────────────────


class NodeTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs what a task submits in threads of its own process.

    So a task that waits for what it has submitted needs no other slot, and its task runs end with its process. Leaving
    it waits for the task runs; after an exception it stops them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(max_workers=sys.maxsize, thread_name_prefix="nested-task")
        self._futures: set[Future[Any]] = set()
        self._running: set[int] = set()

    def duplicate(self) -> Self:
        return type(self)()

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[Any] | None = None,
        dependencies: dict[str, Any] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Run the task with its engine in a thread. Returns at once."""
        words: dict[str, Any] = {
            "task": task,
            "task_run_id": uuid4(),
            "parameters": parameters,
            "wait_for": wait_for,
            "return_type": "state",
            "dependencies": dependencies,
        }
        future = self._threads.submit(copy_context().run, self._run, words)
        self._futures.add(future)
        return PrefectConcurrentFuture(task_run_id=words["task_run_id"], wrapped_future=future)

    def _run(self, words: dict[str, Any]) -> Any:
        ident = threading.get_ident()
        self._running.add(ident)
        try:
            return asyncio.run(run_task_async(**words)) if words["task"].isasync else run_task_sync(**words)
        finally:
            self._running.discard(ident)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while exc_value is None and (left := [one for one in tuple(self._futures) if not one.done()]):
                wait(left)  # they may submit others
        except BaseException as error:
            self._end_all(error)
            raise
        else:
            if exc_value is not None:
                self._end_all(exc_value)
        finally:
            super().__exit__(exc_type, exc_value, trace)
        self._threads.shutdown()

    def _end_all(self, error: BaseException) -> None:
        """Stop the threads. If one does not stop, the process ends, and the call with it."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for ident in tuple(self._running):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(CallStopped))
        if wait(self._futures, timeout=STOP_SECONDS).not_done:
            if isinstance(error, Exception):
                traceback.print_exception(error)
                print(
                    f"a nested task run has not ended {STOP_SECONDS:g} s after this: its process ends", file=sys.stderr
                )
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(128 + signal.SIGTERM)


# ── the services of Prefect ──────────────────────────────────────────────────────────────────────────────────────────


def _end_services(seconds: float) -> None:
    """Send what Prefect's services still have, and end their threads and connections."""
    loops = [getattr(prefect_threads, name, None) for name in ("_global_loop", "_run_sync_loop")]
    alive = [loop for loop in loops if loop is not None and loop.thread.is_alive()]
    if alive:
        # in a thread: Prefect's services are ended in another way where an event loop runs
        ending = threading.Thread(target=copy_context().run, args=(_end, alive, seconds), name="skyward-prefect-end")
        ending.start()
        ending.join()


def _end(loops: list[Any], seconds: float) -> None:
    with suppress(Exception):
        EventsWorker.drain_all(timeout=seconds)
    for loop in loops:
        loop.shutdown()  # it ends all other services of its thread first
        loop.thread.join(seconds)
