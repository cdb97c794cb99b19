"""Objects of the user's project reach a bare interpreter with only installed packages, and come back as themselves."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from skyward_core.serialization.pickling import Pickled, dumps
from tests.serialization.bare_interpreter import Write, results_of, user_project

NODE = """
import pickle, sys
sys.path.append(sys.argv[1])
from skyward_core.serialization.pickling import dumps, loads
for call in pickle.load(sys.stdin.buffer):
    try:
        fn, args, kwargs = loads(call)
        ending = True, fn(*args, **kwargs)
    except Exception as error:
        ending = False, error.with_traceback(None)
    pickle.dump(dumps(ending, label="result"), sys.stdout.buffer, protocol=5)
    assert not any(name == "own" or name.startswith("own_") for name in sys.modules)
"""


def on_node(*calls: Pickled) -> list[Any]:
    """Run the calls, one after the other, in one bare interpreter; return their results, or raise the first error."""
    return results_of(NODE, calls)


def call(fn: Callable[..., Any], *args: Any) -> Any:
    return on_node(dumps((fn, args, {})))[0]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    with user_project(tmp_path, monkeypatch) as write:
        yield write
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_classes_travel_with_their_methods_and_come_back_as_themselves(project: Write) -> None:
    own = project(
        own="""
            from dataclasses import dataclass, field
            from own_base import Base, Color, Mode

            @dataclass(frozen=True, slots=True)
            class Point:
                x: int
                tags: list[str] = field(default_factory=list)
                def moved(self, by): return Point(self.x + by, [*self.tags, "moved"])

            @dataclass
            class Model(Base):
                weight: float
                color: Color = Color.RED
                def name(self): return "model of " + super().name()
                @property
                def twice(self): return 2 * self.weight
                @classmethod
                def make(cls): return cls(3.0, Color.BLUE)
                @staticmethod
                def version(): return 4

            def run(point): return point.moved(2), Model.make(), Model(1.5).twice, Model.version(), Model(1).name(), Color.BLUE, Mode.A | Mode.B
            """,
        own_base="""
            import abc, enum
            class Base(abc.ABC):
                @abc.abstractmethod
                def name(self): return "base"
            class Color(enum.Enum):
                RED = "r"
                BLUE = "b"
                def shout(self): return self.name + "!"
            class Mode(enum.Flag):
                A = 1
                B = 2
            """,
    )
    move = own.Point.moved
    point, model, twice, version, name, color, mode = call(own.run, own.Point(1))
    assert (point, twice, version, name) == (own.Point(3, ["moved"]), 3.0, 4, "model of base")
    assert type(point) is own.Point
    assert isinstance(model, own.Base)
    assert model == own.Model(3.0, own.Color.BLUE)
    assert color is own.Color.BLUE
    assert mode is own.Mode.A | own.Mode.B
    assert own.Point.moved is move, "a result replaced a method of the client's class"


def test_objects_that_python_pickles_only_by_name(project: Write) -> None:
    own = project(
        own="""
            import functools, typing, contextlib
            P = typing.ParamSpec("P")
            T = typing.TypeVar("T")
            Seconds = typing.NewType("Seconds", float)
            type Vector = list[float]
            type Tree = dict[str, Tree] | int
            CONST = 12

            @functools.lru_cache(maxsize=50)
            def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)

            def traced(fn: typing.Callable[P, T]) -> typing.Callable[P, T]:
                @functools.wraps(fn)
                def wrapper(*args: P.args, **kwargs: P.kwargs) -> T: return fn(*args, **kwargs)
                return wrapper

            @contextlib.contextmanager
            def context(): yield 3

            class Box[X]:
                def __init__(self, item: X) -> None: self.item = item

            class Old(typing.Generic[T]):
                pass

            @traced
            def run(v: Vector, tree: Tree, s: Seconds, old: Old[int] | None = None):
                class Local:
                    value = CONST
                with context() as three:
                    return fib(30), fib.cache_parameters()["maxsize"], fib.__name__, Local.value, three, Box(v).item, traced(sum)(v)
            """
    )
    assert call(own.run, [1.0], {}, 2.0) == (832040, 50, "fib", 12, 3, [1.0], 1.0)


def test_single_dispatch_travels_with_its_implementations(project: Write) -> None:
    """Also one that calls itself, one whose implementation is in another module, and a method."""
    own = project(
        own_show="""
            import functools
            @functools.singledispatch
            def show(x): "says it"; return "any"
            @show.register
            def _(x: int | float): return "number"
            @show.register(list)
            def _of_list(x): return [show(item) for item in x]
            """,
        own="""
            import functools, own_show
            class Point: pass
            @own_show.show.register
            def _(x: Point): return "point"
            class Shown:
                @functools.singledispatchmethod
                def of(self, x): return "any"
                @of.register
                def _(self, x: int): return "number"
            def run():
                show = own_show.show
                texts = show([1, 2.5, "x", Point()])
                return texts, show.__name__, show.__doc__, sorted(t.__name__ for t in show.registry), Shown().of(1)
            """,
    )
    texts, name, doc, types, of_method = call(own.run)
    assert (texts, name, doc) == (["number", "number", "any", "point"], "show", "says it")
    assert types == ["Point", "float", "int", "list", "object"]
    assert of_method == "number"


def positive(x: int) -> bool:
    assert x > 0, "it must be positive"
    return any(name.partition(".")[0] in ("pytest", "_pytest") for name in sys.modules)


def test_a_function_that_pytest_has_rewritten_needs_no_pytest() -> None:
    """Its module was imported by pytest, which changes the code of each assertion."""
    assert "@pytest_ar" in positive.__globals__
    assert call(positive, 1) is False
    with pytest.raises(AssertionError, match="it must be positive\nassert 0 > 0"):
        call(positive, 0)


def test_a_global_travels_with_its_present_value(project: Write) -> None:
    own = project(
        own="""
            import own_config
            RATE = 1
            class Settings: depth = 1
            def run(): return RATE, own_config.SIZE, Settings.depth
            """,
        own_config="SIZE = 1",
    )
    first = dumps((own.run, (), {}))
    own.RATE = sys.modules["own_config"].SIZE = own.Settings.depth = 2
    assert on_node(first, dumps((own.run, (), {}))) == [(1, 1, 1), (2, 2, 2)]


SCRIPT = """
import pickle, sys
from dataclasses import dataclass
from skyward_core.serialization.pickling import dumps
@dataclass
class Foo:
    n: int
def helper(foo): return foo.n + BASE
BASE = 40
def run(foo): return helper(foo)
pickle.dump(dumps((run, (Foo(2),), {})), sys.stdout.buffer)
"""


def test_main_travels_by_value(tmp_path: Path) -> None:
    """The node's `__main__` is another program."""
    (tmp_path / "script.py").write_text(SCRIPT)
    assert on_node(pickle.loads(subprocess.check_output([sys.executable, tmp_path / "script.py"]))) == [42]


def test_many_threads_at_once(project: Write) -> None:
    """Pickles made in parallel are all by value: the node has no module of the project."""
    own = project(own="import own_helpers\ndef run(): return own_helpers.f()", own_helpers="def f(): return 1")
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: dumps((own.run, (), {})), range(200)))
    assert on_node(*made) == [1] * 200


def test_replace_replaces_an_object(project: Write) -> None:
    own = project(
        own="""
            class Task:
                def __init__(self, fn): self.fn = fn; self.lock = __import__("threading").Lock()
            @Task
            def helper(n): return 0 if n == 0 else 1 + helper(n - 1)
            def run(n): return helper(n)
            """
    )
    replaced = dumps((own.run, (5,), {}), replace=lambda obj: obj.fn if isinstance(obj, own.Task) else NotImplemented)
    assert on_node(replaced) == [5]
