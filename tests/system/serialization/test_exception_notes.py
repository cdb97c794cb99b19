"""Notes that exceptions of calls get: the package that the node lacks, and the node's working directory."""

import pytest

import skyward_core as sky


def _notes(pending: sky.PendingCompute, pool: sky.ComputePool, kind: type[BaseException]) -> str:
    with pytest.raises(kind) as caught:
        pending >> pool
    assert type(caught.value) is kind
    return "\n".join(caught.value.__notes__)


@sky.compute
def import_missing(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@sky.compute
def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def test_a_module_that_the_node_lacks_is_named_as_its_distribution(pool):
    """The distribution's own name if this client has it, the module's otherwise; the exception itself is unchanged."""
    assert 'Image(pip=[...]), as "scikit-learn"' in _notes(import_missing("sklearn"), pool, ModuleNotFoundError)
    assert 'Image(pip=[...]), as "no_such_module_9"' in _notes(
        import_missing("no_such_module_9"), pool, ModuleNotFoundError
    )


def test_a_relative_path_belongs_to_the_node(pool):
    """A missing file in the node's working directory has the note. A missing file with an absolute path has none,
    and neither has another error.
    """
    assert "the working directory of a call is the node's own" in _notes(read("data.csv"), pool, FileNotFoundError)
    assert "working directory" not in _notes(read("/no/such/file"), pool, FileNotFoundError)
    assert "working directory" not in _notes(read("."), pool, IsADirectoryError)
