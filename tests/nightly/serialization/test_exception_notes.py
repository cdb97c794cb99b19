"""Notes that exceptions of calls get: the package that the node lacks, and the node's working directory."""

import pytest

from skyward_core.serialization.exception_notes import note_for


def test_a_missing_part_of_an_installed_package_is_a_question_of_versions():
    """If the package is there and its module is not, another version is needed."""
    assert note_for(ModuleNotFoundError(name="sklearn.nothing")) == (
        "the node has 'sklearn', but no 'sklearn.nothing' in it: name the version that you use here in Image(pip=[...]), for \"scikit-learn\""
    )


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("own_note.py", "travels if an `import` statement names it"),
        ("own_note.abi3.so", "machine code does not travel"),
    ],
)
def test_a_module_of_the_project_is_in_no_index(tmp_path, monkeypatch, file, advice):
    """A file of the project cannot be installed: the note says that it is to be imported, or built."""
    (tmp_path / file).write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert advice in str(note_for(ModuleNotFoundError(name="own_note")))
