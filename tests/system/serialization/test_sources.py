"""Modules that functions import in their bodies reach a bare interpreter with only installed packages, and the
client's classes come back.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.serialization import sources
from skyward_core.serialization.pickling import Pickled
from tests.serialization.bare_interpreter import Write, results_of, user_project

NODE = """
import pickle, sys, traceback
sys.path[:0] = sys.argv[2:]
sys.path.append(sys.argv[1])
from skyward_core.serialization import pickling, sources
known = {}
for function, arguments in pickle.load(sys.stdin.buffer):
    sources.begin_call()
    try:
        loaded = known.get(function.data)
        if loaded is None:
            loaded = known[function.data] = sources.unpack(function.data, function.buffers)
        sources.install(loaded.sources)
        args, kwargs = sources.unpack(arguments.data, arguments.buffers).value
        ending = True, loaded.value(*args, **kwargs), ""
    except Exception as error:
        text = traceback.format_exc()
        ending = False, error.with_traceback(None), text
    pickle.dump(pickling.dumps(ending, label="result"), sys.stdout.buffer, protocol=5)
"""


def packed(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Pickled, Pickled]:
    """A call as the client sends it: the function and its arguments, separately."""
    return sources.pack(fn), sources.pack((args, kwargs))


def on_node(*calls: tuple[Pickled, Pickled], path: tuple[Path, ...] = ()) -> list[Any]:
    """Run the calls, one after the other, in one bare interpreter with these search paths; return their values, or
    raise the first error.
    """
    return results_of(NODE, calls, path)


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return on_node(packed(fn, *args, **kwargs))[0]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    home = tmp_path / "home"
    home.mkdir()
    with user_project(home, monkeypatch) as write:
        yield write


def test_a_helper_module_imported_in_the_body(project: Write) -> None:
    own = project(
        own="""
            def run(x):
                from own_helpers import load
                return load(x)
            """,
        own_helpers="""
            import math
            import own_base
            def load(x):
                import own_late
                return own_late.f(math.floor(x) + own_base.ONE)
            """,
        own_base="ONE = 1",
        own_late="def f(x): return 10 * x",
        own_unused="raise SystemExit",
    )
    calls = packed(own.run, 2.5)
    assert not {"own_helpers", "own_base", "own_late"} & sys.modules.keys()
    assert [source.name for source in sources.collect([own.run])] == ["own_base", "own_helpers", "own_late"]
    assert on_node(calls) == [30]


@pytest.mark.parametrize(
    "body",
    [
        "import own_pkg.sub.deep; return own_pkg.sub.deep.f(), own_pkg.NAME",
        "import own_pkg.sub.deep as deep, own_pkg; return deep.f(), own_pkg.NAME",
        "from own_pkg.sub import deep; from own_pkg import NAME; return deep.f(), NAME",
        "from own_pkg.sub.deep import f; from own_pkg import NAME as name; return f(), name",
        "from own_pkg.relative import run; return run()",
    ],
)
def test_modules_of_packages(project: Write, body: str) -> None:
    own = project(
        own=f"def run():\n    {body}",
        own_pkg__in____init__="from .names import NAME",
        own_pkg__in__names="NAME = 'pkg'",
        own_pkg__in__relative="""
            def run():
                from . import NAME
                from .sub import deep
                return deep.f(), NAME
            """,
        own_pkg__in__sub__in____init__="",
        own_pkg__in__sub__in__deep="from ..sums import one\ndef f(): return one() + 1",
        own_pkg__in__sums="def one(): return 1",
    )
    assert call(own.run) == (2, "pkg")


def test_a_changed_text_is_imported_again(project: Write) -> None:
    own = project(
        own="def run():\n    from own_model import predict\n    return predict()",
        own_model="from own_layers import N\ndef predict(): return N",
    )
    calls = []
    for text in ("N = 1", "N = 20", "N = 1"):
        project(own_layers=text)
        calls.append(packed(own.run))
    assert calls[0][0].data == calls[2][0].data, "the third call should find its function known"
    assert on_node(*calls) == [1, 20, 1]


def test_a_module_keeps_its_state_between_calls(project: Write) -> None:
    own = project(
        own="""
            def first():
                import own_state
                own_state.seen.append(1)
                return own_state.seen
            def second():
                import own_state, own_other
                own_state.seen.append(own_other.TWO)
                return own_state.seen
            """,
        own_state="seen = []",
        own_other="TWO = 2",
    )
    assert on_node(packed(own.first), packed(own.second), packed(own.first)) == [[1], [1, 2], [1, 2, 1]]


CONFIG = """
    import dataclasses, enum
    class Mode(enum.Enum):
        FAST = 1
    @dataclasses.dataclass
    class Config:
        n: int
        mode: Mode = Mode.FAST
    class Divergence(ValueError):
        def __init__(self, step): super().__init__(f"diverged at {step}"); self.step = step
        def __reduce__(self): return Divergence, (self.step,)
    def more(config):
        if not isinstance(config, Config) or config.mode is not Mode.FAST: raise TypeError(type(config))
        return Config(config.n + 1)
    def fail(): raise Divergence(7)
"""


def test_a_class_of_a_module_that_the_node_cannot_import_travels_by_value(project: Write) -> None:
    """If a body never runs the import, a module that needs a package that the node lacks does no harm."""
    own = project(
        own="""
            from own_flow import Config
            def run(config, deep):
                if deep:
                    import own_flow
                return config.n
            """,
        own_flow="""
            import sys
            assert "pytest" in sys.modules, "only on the client"
            class Config:
                n = 4
            """,
    )
    assert call(own.run, own.Config(), deep=False) == 4
    with pytest.raises(AssertionError, match="only on the client"):
        call(own.run, own.Config(), deep=True)


def test_a_traceback_shows_the_line_of_the_helper(project: Write, tmp_path: Path) -> None:
    own = project(
        own="def run():\n    import own_helpers\n    own_helpers.f()",
        own_helpers="def f():\n    raise KeyError('k')  # the line",
    )
    calls = packed(own.run)
    (tmp_path / "home" / "own_helpers.py").write_text("# edited since")
    with pytest.raises(KeyError) as caught:
        on_node(calls)
    assert f"{tmp_path}/home/own_helpers.py\", line 2, in f\n    raise KeyError('k')  # the line" in "".join(
        caught.value.__notes__
    )


def test_the_nodes_own_modules_have_precedence(project: Write, tmp_path: Path) -> None:
    own = project(
        own="def run():\n    import own_a, own_b\n    return own_a.A, own_b.B", own_a="A = 'sent'", own_b="B = 'sent'"
    )
    node = tmp_path / "node"
    (node / "own_b").mkdir(parents=True)
    (node / "own_a.py").write_text("A = 'installed'")
    assert on_node(packed(own.run), path=(node,)) == [("installed", "sent")]


def test_modules_inside_a_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that nobody has imported yet, and those of a loader without files."""
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("own_app/__init__.py", "")
        archive.writestr(
            "own_app/main.py",
            "def run(x):\n from own_app.helper import twice\n import own_alone\n import own_made\n"
            " return twice(x) + own_alone.ONE + own_made.TEN",
        )
        archive.writestr("own_app/helper.py", "from . import deep\ndef twice(x): return deep.TWO * x")
        archive.writestr("own_app/deep.py", "TWO = 2")
        archive.writestr("own_alone.py", "ONE = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "app.zip"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, OfMemory(tmp_path)])
    run = importlib.import_module("own_app.main").run
    try:
        assert call(run, 5) == 21
    finally:
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]


class OfMemory(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds own_made, whose file is nowhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: object, target: object = None, /) -> importlib.machinery.ModuleSpec | None:
        if fullname != "own_made":
            return None
        place = str(self._folder / "own_made.py")
        return importlib.util.spec_from_file_location(fullname, place, loader=self)

    def get_source(self, fullname: str) -> str:
        return "TEN = 10"


def test_through_a_pool(project: Write, tmp_path: Path) -> None:
    own = project(
        own="""
            from own_config import Config
            def run(config):
                from own_pkg import step
                return step.forward(config)
            def fail():
                from own_config import fail
                fail()
            def missing(): import own_nowhere
            """,
        own_config=CONFIG,
        own_pkg__in____init__="",
        own_pkg__in__step="from own_config import more\ndef forward(config): return more(config)",
    )
    run, fail, missing = (sky.compute(fn) for fn in (own.run, own.fail, own.missing))
    with sky.ComputePool(provider=sky.Local(), nodes=1, display="quiet") as pool:
        assert run(own.Config(1)) >> pool == own.Config(2)
        project(own_pkg__in__step="from own_config import more\ndef forward(config): return more(more(config))")
        assert run(own.Config(1)) >> pool == own.Config(3)
        with pytest.raises(sys.modules["own_config"].Divergence) as caught:
            fail() >> pool
        assert "own_config.py" in str(caught.value.__cause__)
        assert "def fail(): raise Divergence(7)" in str(caught.value.__cause__)
        with pytest.raises(ModuleNotFoundError, match="'own_nowhere'"):
            missing() >> pool
