"""`PipesSkywardClient`: a function, a script or a command on the pool, with Dagster Pipes.

A message is a marked line of the call's output, so that it arrives at once and without another connection. The reader
takes the marked lines, and the others go to the step's log.
"""

import importlib.util
import json
import threading
import uuid
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg

import skyward_core as sky
from dagster_skyward import metadata
from dagster_skyward.final_errors import not_tried_again
from dagster_skyward.on_node import function_on_node
from dagster_skyward.plain_values import plain_pending
from dagster_skyward.resource import SkywardResource
from dagster_skyward.step import Use

CLOSED_SECONDS = 30.0
"""How long the last messages of a call may come after its result."""
FAILED_SECONDS = 2.0
"""The same after an error, which may be the loss of the node."""


class PipesSkywardClient(dg.ConfigurableResource, dg.PipesClient):  # pyright: ignore[reportMissingTypeArgument]
    """Runs functions, scripts and commands on a pool, with a `PipesContext` on each node.

    Logs arrive in the step's log at once; materializations, checks and custom messages are in the result. The nodes
    need no Dagster. The pool is that of the nested resource `compute`.
    """

    is_skyward: ClassVar[bool] = True
    compute: SkywardResource

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        *,
        context: dg.AssetExecutionContext | dg.OpExecutionContext,
        fn: Callable[..., Any] | sky.ComputeFunction[..., Any] | None = None,
        script: str | Path | None = None,
        command: str | Sequence[str] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        map_over: Iterable[Any] | None = None,
        broadcast: bool = False,
        extras: Mapping[str, Any] | None = None,
    ) -> dg.PipesClientCompletedInvocation:
        """Run `fn(*args, **kwargs)`, a Python file of this machine, or a command, and wait for its end.

        A script and a command get `args` and `env`; a command that is one text is run by the node's shell. `map_over`
        makes one call for each of its items, in parallel, which is the first argument. `broadcast=True` runs it on each
        worker. Each of these calls is a writer of messages. `extras` are in `PipesContext.get().extras`. The
        function's own exception is raised here. A step that is terminated stops the calls.

        Raises BadRequest unless exactly one of `fn`, `script` and `command` is given.
        """
        if sum(given is not None for given in (fn, script, command)) != 1:
            raise sky.BadRequest("PipesSkywardClient.run: write either fn=..., script=... or command=...")
        if fn is not None and env:
            raise sky.BadRequest(
                "env is for a script or a command: a function has the variables of its pool, SkywardResource(env=)"
            )
        firsts = [()] if map_over is None else [(item,) for item in map_over]
        if broadcast and map_over is not None:
            raise sky.BadRequest("map_over makes one call for each item, and broadcast one for each worker: choose one")
        if not firsts:
            raise sky.BadRequest("map_over has no items: there is nothing to run")
        with not_tried_again():
            payloads = [_payload(fn, script, command, (*first, *args), kwargs or {}, env or {}) for first in firsts]
        with self.compute.using(context) as use:
            workers = use.pool.instance_count * use.pool.spec.workers_per_node
            reader = _LineReader(workers if broadcast else len(payloads))
            with (
                self.compute.listening(use, reader.take),
                dg.open_pipes_session(
                    context=context,
                    context_injector=dg.PipesEnvContextInjector(),
                    message_reader=reader,
                    extras=dict(extras or {}),
                ) as session,
            ):
                head = (_Library(), dict(session.get_bootstrap_env_vars()), reader.mark)
                calls = [sky.PendingCompute(_on_node(name), (*head, *rest), {}) for name, rest in payloads]
                _run(use, calls, reader, broadcast=broadcast)
        found = {} if use.usage is None else metadata.plain(use.usage)
        return dg.PipesClientCompletedInvocation(session, metadata=found if context.has_assets_def else {})


def _payload(
    fn: Callable[..., Any] | sky.ComputeFunction[..., Any] | None,
    script: str | Path | None,
    command: str | Sequence[str] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    env: Mapping[str, str],
) -> tuple[str, tuple[Any, ...]]:
    """Return the function of `pipes_node` for one call, and its own arguments. Raises NotPicklable."""
    if fn is not None:
        given = plain_pending(fn, args, dict(kwargs), ("args", "kwargs"))
        return "run_function", (given.fn, given.args, dict(given.kwargs))
    words = [str(one) for one in args]
    if command is not None:
        # the shell takes the next word for its own name
        line = ["/bin/sh", "-c", f'{command} "$@"', "sh"] if isinstance(command, str) else [*map(str, command)]
        return "run_command", ([*line, *words], dict(env))
    assert script is not None
    path = Path(script)
    return "run_script", (path.name, path.read_bytes(), words, dict(env))


def _run(use: Use, calls: Sequence[sky.PendingCompute[Any]], reader: "_LineReader", *, broadcast: bool) -> None:
    try:
        use.pool.broadcast(calls[0]) if broadcast else use.pool.run_batch(sky.gather(*calls))
    except Exception:
        reader.wait(FAILED_SECONDS)
        raise
    reader.wait(CLOSED_SECONDS)


class _LineReader(dg.PipesMessageReader):
    """Takes the marked lines of the calls of one session, in the thread of the pool's events."""

    def __init__(self, writers: int) -> None:
        self.mark = f"::skyward-pipes-{uuid.uuid4().hex}"
        self._writers = writers
        self._handler: Any = None
        self._parts: dict[tuple[int, str], list[str]] = {}
        self._closed = threading.Semaphore(0)
        self._error: Exception | None = None

    @property
    def expected_writer_count(self) -> int:
        """How many nodes and workers write."""
        return self._writers

    @contextmanager
    def read_messages(self, handler: Any) -> Generator[dict[str, Any]]:
        """Give the handler the messages from now on."""
        self._handler = handler
        yield {}

    def no_messages_debug_text(self) -> str:
        """Say where the messages should have come from."""
        return "Read the marked lines of the call's output on the node."

    def take(self, event: sky.SkywardEvent) -> bool:
        """Return whether the event is a message of this session, and handle it."""
        if not isinstance(event, sky.LogLine) or self.mark not in event.line:
            return False
        # a progress bar without its line end may stand before the mark
        writer, rest, part = event.line.partition(self.mark)[2].lstrip().split(" ", 2)
        parts = self._parts.setdefault((event.node, writer), [])
        parts.append(part)
        if rest == "0":
            del self._parts[event.node, writer]
            self._handle("".join(parts))
        return True

    def wait(self, seconds: float) -> None:
        """Wait until all writers have closed; raise the error of a message that could not be handled."""
        for _ in range(self._writers):
            if not self._closed.acquire(timeout=seconds):
                break
        if self._error is not None:
            raise self._error

    def _handle(self, text: str) -> None:
        message: dict[str, Any] = {}
        try:
            message = json.loads(text)
            self._handler.handle_message(message)
        except Exception as error:
            self._error = self._error or error
        finally:
            if message.get("method") == "closed":
                self._closed.release()


class _Library:
    """The source of `dagster_pipes`. When it is unpickled on a node, `import dagster_pipes` works from then on: so it
    stands before a function that needs it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _on_node("install_library"), (_library(),)


@cache
def _library() -> bytes:
    spec = importlib.util.find_spec("dagster_pipes")
    assert spec is not None
    assert spec.origin is not None
    return zlib.compress(Path(spec.origin).read_bytes())


def _on_node(name: str) -> Any:
    return function_on_node("pipes_node", name)
