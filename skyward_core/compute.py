"""`@compute` and the operators: calls that have not been made yet, and how a pool makes them.

    fn(x) >> pool            one call, on one worker                -> R, or the items of a generator
    fn(x) @ pool             the same call on every worker          -> tuple[R, ...]
    (f(x) & g(y)) >> pool    calls in parallel                      -> tuple[R, S]
    gather(*calls) >> pool   as many calls as you like, in parallel -> tuple[R, ...]
    fn(x).timeout(30) >> pool    a call that may run for 30 seconds; also of a batch, and with `@`

In Python `&` binds weaker than `>>`, so it needs the parentheses.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Protocol, Self, cast, overload

if TYPE_CHECKING:
    from skyward_core.concurrency.item_stream import ItemStream


class PendingRunner(Protocol):
    """The right operand of `>>` and `@`: a pool, or another object with these three methods."""

    def run[R](self, pending: PendingCompute[R]) -> R:
        """Run one call and return its result."""
        ...

    def run_batch(self, batch: PendingBatch[*tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run the calls in parallel and return their results in order."""
        ...

    def broadcast[R](self, pending: PendingCompute[R]) -> tuple[R, ...]:
        """Run the call on every worker and return the results in the order of the workers."""
        ...


class AsyncRunner(Protocol):
    """The right operand of `>>` and `@` in a coroutine: `pool.aio`. Its methods return coroutines."""

    def run[R](self, pending: PendingCompute[R]) -> Coroutine[Any, Any, R]:
        """Run one call and return its result."""
        ...

    def run_batch(self, batch: PendingBatch[*tuple[Any, ...]]) -> Coroutine[Any, Any, tuple[Any, ...]]:
        """Run the calls in parallel and return their results in order."""
        ...

    def broadcast[R](self, pending: PendingCompute[R]) -> Coroutine[Any, Any, tuple[R, ...]]:
        """Run the call on every worker and return the results in the order of the workers."""
        ...


class PendingCompute[R]:
    """A call not yet made: function and arguments, frozen. Nothing runs, and nothing is spent, before `>>` or `@`.

    `timeout_seconds` is how long it may run on its node; None: as long as it likes.
    """

    __slots__ = ("args", "fn", "kwargs", "timeout_seconds")

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_seconds: float | None

    def __init__(
        self,
        fn: Callable[..., R],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", dict(kwargs or {}))
        object.__setattr__(self, "timeout_seconds", _checked_timeout(timeout_seconds))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a pending call cannot be changed ({name})")

    def timeout(self, seconds: float | None) -> PendingCompute[R]:
        """Return the call with a deadline: it may run for so many seconds on its node.

        The time begins when a slot of the node takes the call, and includes loading its function and arguments; the
        time in the queue does not count. At the deadline the call gets SIGTERM, two seconds later SIGKILL, and
        CallTimedOut is raised here. It is not run again, whatever `retries` says. A call that runs again because its
        node was lost has the whole time again. None: no deadline. Raises BadRequest for no or infinite time.
        """
        return PendingCompute(self.fn, self.args, self.kwargs, seconds)

    @property
    def forms_group(self) -> bool:
        """Whether the workers of a broadcast form a group: `@sky.distributed...` marks such functions."""
        return bool(getattr(self.fn, "forms_group", False))

    @property
    def why_no_result(self) -> str:
        """Say what is wrong with a function that returns this, and what to write instead; read where calls run."""
        name = _name(self.fn)
        return (
            f"it is a call that was not made: {name!r} is decorated with @sky.compute, so that calling it gives a"
            f" pending call. Write {name}.local(...) to run it inside this function; or give the calls to the pool:"
            f" pool.map({name}, ...), {name}(...) >> pool"
        )

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Raise TypeError that says what to write: a pending call as an argument or deep in a result is a mistake."""
        name = _name(self.fn)
        raise TypeError(
            f"a call that was not made does not travel: make it first, {name}(...) >> pool, and pass its result; inside"
            f" a function write {name}.local(...)"
        )

    @overload
    def __rshift__(self, pool: PendingRunner) -> R: ...
    @overload
    def __rshift__(self, pool: AsyncRunner) -> Coroutine[Any, Any, R]: ...
    def __rshift__(self, pool: PendingRunner | AsyncRunner) -> Any:
        """Run the call on the pool and return its result; its exception is raised here."""
        return _runner(pool, ">>").run(self)

    @overload
    def __matmul__(self, pool: PendingRunner) -> tuple[R, ...]: ...
    @overload
    def __matmul__(self, pool: AsyncRunner) -> Coroutine[Any, Any, tuple[R, ...]]: ...
    def __matmul__(self, pool: PendingRunner | AsyncRunner) -> Any:
        """Run the call on every worker of the pool at once; results come in the order of the workers."""
        return _runner(pool, "@").broadcast(self)

    def __and__[S](self, other: PendingCompute[S]) -> PendingBatch[R, S]:
        """Group two calls, to run in parallel."""
        return PendingBatch(self, _pending(other))

    def __repr__(self) -> str:
        arguments = [*map(_brief, self.args), *(f"{name}={_brief(value)}" for name, value in self.kwargs.items())]
        return f"<pending {_name(self.fn)}({', '.join(arguments)})>"


class PendingItems[T](PendingCompute[list[T]]):
    """A call of a generator, not yet made. `>> pool` gives its items as they come; all other ways give a list."""

    __slots__ = ()

    def timeout(self, seconds: float | None) -> PendingItems[T]:
        """Return the call with a deadline, as `PendingCompute.timeout` has it.

        The time in which the node waits for the program to take items counts too.
        """
        return PendingItems(self.fn, self.args, self.kwargs, seconds)

    @overload
    def __rshift__(self, pool: PendingRunner) -> ItemStream[T]: ...
    @overload
    def __rshift__(self, pool: AsyncRunner) -> Coroutine[Any, Any, list[T]]: ...
    def __rshift__(  # pyright: ignore[reportIncompatibleMethodOverride] - an item stream is no list
        self, pool: PendingRunner | AsyncRunner
    ) -> Any:
        """Run the call on the pool and return its items, each when the node has yielded it.

        A runner without streams (`pool.aio`) gives a list.
        """
        runner = _runner(pool, ">>")
        stream = getattr(runner, "stream", runner.run)
        return stream(self)


class PendingBatch[*Rs]:
    """Calls not yet made that will run in parallel; `>> pool` returns the tuple of their results, in order."""

    __slots__ = ("calls",)

    calls: tuple[PendingCompute[Any], ...]

    def __init__(self, *calls: PendingCompute[Any]) -> None:
        object.__setattr__(self, "calls", calls)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch of pending calls cannot be changed ({name})")

    def timeout(self, seconds: float | None) -> PendingBatch[*Rs]:
        """Return the batch with this deadline for each of its calls, as `PendingCompute.timeout` has it."""
        return PendingBatch(*(call.timeout(seconds) for call in self.calls))

    @property
    def why_no_result(self) -> str:
        """The same as for its calls."""
        return self.calls[0].why_no_result if self.calls else "it is an empty batch of calls"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Raise TypeError, as its calls do."""
        raise TypeError(
            "calls that were not made do not travel: make them first, (f(x) & g(y)) >> pool, and pass their results"
        )

    def __and__[S](self, other: PendingCompute[S]) -> PendingBatch[*Rs, S]:
        """Add a call."""
        return PendingBatch(*self.calls, _pending(other))

    @overload
    def __rshift__(self, pool: PendingRunner) -> tuple[*Rs]: ...
    @overload
    def __rshift__(self, pool: AsyncRunner) -> Coroutine[Any, Any, tuple[*Rs]]: ...
    def __rshift__(self, pool: PendingRunner | AsyncRunner) -> Any:
        """Run all calls in parallel.

        The first error, in the order of the calls, is raised; then the calls that still run are cancelled.
        """
        return _runner(pool, ">>").run_batch(cast("PendingBatch[*tuple[Any, ...]]", self))

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"<pending batch of {len(self.calls)}>"


class ComputeFunction[**P, R]:
    """A function made lazy by `@compute`: calling it gives a `PendingCompute`.

    `.local` is the function itself; calling it runs the function in this process.
    """

    def __init__(self, fn: Callable[P, R]) -> None:
        self.local: Callable[P, R] = fn
        functools.update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> PendingCompute[R]:
        """Return the call, to be run by a pool.

        Raises TypeError at once for wrong arguments, with Python's own message.
        """
        refuse_wrong_arguments(self.local, args, kwargs)
        return PendingCompute(self.local, args, kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__[S, **Q, T](
        self: ComputeFunction[Concatenate[S, Q], T], instance: S, owner: type | None = None
    ) -> ComputeFunction[Q, T]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind like a function does, so that `@compute` works on methods."""
        return self if instance is None else type(self)(functools.partial(cast(Any, self.local), instance))

    def __repr__(self) -> str:
        return f"<compute {_name(self.local)}>"


class GeneratorFunction[**P, T](ComputeFunction[P, list[T]]):
    """A generator made lazy by `@compute`: calling it gives a `PendingItems`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> PendingItems[T]:
        """Return the call, to be run by a pool. Raises TypeError at once for wrong arguments."""
        refuse_wrong_arguments(self.local, args, kwargs)
        return PendingItems(self.local, args, kwargs)


def not_pending(given: object, operator: str) -> TypeError:
    """Return the error of `given >> pool` or `given @ pool`, when that is no pending call; it says what to write."""
    if isinstance(given, ComputeFunction):
        name = _name(cast("Any", given).local)
        return TypeError(f"`{name} {operator} pool` calls nothing: write `{name}(...) {operator} pool`")
    if (
        isinstance(given, list | tuple)
        and given
        and all(isinstance(item, PendingCompute) for item in cast("Any", given))
    ):
        return TypeError(
            f"`{operator}` sends one call, and this is a {type(given).__name__} of calls: write"
            f" `sky.gather(*calls) {operator} pool`, or `pool.map(fn, values)`"
        )
    return TypeError(
        f"`{operator}` sends a pending call to a pool, and {type(given).__name__!r} is none: write @sky.compute above"
        f" the function, and `fn(x) {operator} pool`"
    )


@overload
def compute[**P, R](fn: Callable[P, Coroutine[Any, Any, R]]) -> ComputeFunction[P, R]: ...
@overload
def compute[**P, Y](fn: Callable[P, Generator[Y, Any, Any]]) -> GeneratorFunction[P, Y]: ...
@overload
def compute[**P, Y](fn: Callable[P, AsyncGenerator[Y, Any]]) -> GeneratorFunction[P, Y]: ...
@overload
def compute[**P, R](fn: Callable[P, R]) -> ComputeFunction[P, R]: ...
def compute(fn: Callable[..., Any]) -> Any:
    """Make a function lazy: a call returns `PendingCompute[R]` instead of running.

    A coroutine function is run to its end on the node. The items of a generator come one by one with `>>`, and as a
    list with all else.

    >>> @compute
    ... def double(x: int) -> int:
    ...     return 2 * x
    >>> double(21)
    <pending double(21)>
    >>> double.local(21)
    42
    """
    if not callable(fn):
        raise TypeError(f"{fn!r} is no function: write @sky.compute above one, or sky.compute(fn)")
    return fn if isinstance(fn, ComputeFunction) else _function_type(fn)(fn)


def _function_type(fn: Callable[..., Any]) -> type[ComputeFunction[..., Any]]:
    is_generator = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
    return GeneratorFunction if is_generator else ComputeFunction


@overload
def gather() -> PendingBatch[*tuple[()]]: ...
@overload
def gather[A](a: PendingCompute[A], /) -> PendingBatch[A]: ...
@overload
def gather[A, B](a: PendingCompute[A], b: PendingCompute[B], /) -> PendingBatch[A, B]: ...
@overload
def gather[A, B, C](a: PendingCompute[A], b: PendingCompute[B], c: PendingCompute[C], /) -> PendingBatch[A, B, C]: ...
@overload
def gather[A, B, C, D](
    a: PendingCompute[A], b: PendingCompute[B], c: PendingCompute[C], d: PendingCompute[D], /
) -> PendingBatch[A, B, C, D]: ...
@overload
def gather[R](*computations: PendingCompute[R]) -> PendingBatch[*tuple[R, ...]]: ...
def gather(*computations: PendingCompute[Any]) -> PendingBatch[*tuple[Any, ...]]:
    """Group calls to run in parallel; `gather(...) >> pool` returns their results in order.

    Raises TypeError for anything that is no pending call.
    """
    return PendingBatch(*map(_pending, computations))


def refuse_wrong_arguments(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError, as a call would, if a function does not take these arguments.

    A function without a signature is not checked.
    """
    if isinstance(fn, types.FunctionType):
        _twin(fn)(*args, **kwargs)
    elif isinstance(fn, functools.partial):
        refuse_wrong_arguments(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    elif isinstance(fn, types.MethodType):
        refuse_wrong_arguments(fn.__func__, (fn.__self__, *args), kwargs)
    else:
        try:
            signature = inspect.signature(fn)
        except (ValueError, TypeError):  # many functions in C have no signature
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{_name(fn)}(): {error}") from None


_twins: weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType] = weakref.WeakKeyDictionary()
_TAKES_MORE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def _twin(fn: types.FunctionType) -> types.FunctionType:
    """Return a function that takes the same arguments as `fn`, and does nothing: then Python itself reports what is
    wrong with a call.
    """
    twin = _twins.get(fn)
    if twin is None:
        nothing, code = _nothing.__code__, fn.__code__
        empty = code.replace(
            co_code=nothing.co_code,
            co_consts=nothing.co_consts,
            co_names=(),
            co_freevars=(),
            co_cellvars=(),
            co_stacksize=nothing.co_stacksize,
            co_flags=nothing.co_flags | (code.co_flags & _TAKES_MORE),
            co_exceptiontable=b"",
            co_linetable=nothing.co_linetable,
        )
        twin = _twins[fn] = types.FunctionType(empty, {}, fn.__name__)
        twin.__qualname__ = fn.__qualname__
    twin.__defaults__, twin.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__  # a program may change these two
    return twin


def _nothing() -> None:
    return None


def _runner(pool: object, operator: str) -> PendingRunner:
    if not isinstance(pool, type) and all(
        callable(getattr(pool, name, None)) for name in ("run", "run_batch", "broadcast")
    ):
        return cast(PendingRunner, pool)
    raise TypeError(
        f"`{operator}` sends a call to a pool, not to {type(pool).__name__!r}: write `with sky.ComputePool(...) as"
        f" pool:` and `fn(x) {operator} pool`"
    )


def _pending(other: object) -> PendingCompute[Any]:
    if isinstance(other, PendingCompute):
        return cast("PendingCompute[Any]", other)
    if isinstance(other, ComputeFunction):
        raise TypeError(
            f"{other!r} is a function, not a call: write {_name(cast('ComputeFunction[..., Any]', other).local)}(...)"
        )
    raise TypeError(
        f"only pending calls can be put together, and this is {type(other).__name__!r}. Is the function decorated with"
        " @compute? And since `&` binds weaker than `>>`, parentheses are needed: (f(x) & g(y)) >> pool"
    )


def _checked_timeout(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    # the import of `skyward_core` loads this module, and not that one
    from skyward_core.written_numbers import LONGEST_SECONDS, number

    what = f"the seconds that the call may run, more than 0, at most {LONGEST_SECONDS:.0f}; None: any time"
    return number(seconds, "timeout", what, most=LONGEST_SECONDS, is_text_read=False)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
