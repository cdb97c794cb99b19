"""Each program of examples/, flows/ and dags/ names the packages that it imports, in one line for pip."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.programs_of_users import PROGRAMS, ROOT, wanted

OURS = {"skyward_core": "", "prefect_skyward": "prefect", "dagster_skyward": "dagster"}
OURS |= {"airflow_provider_skyward": "airflow"}
MODULES = {"scikit-learn": "sklearn", "apache-airflow": "airflow", "tensorflow-cpu": "tensorflow"}
"""Names of distributions that are not those of their modules."""
BROUGHT = {
    "transformers[torch]": "torch",
    "lightning": "torch",
    "scikit-learn": "numpy",
    "jax": "numpy",
    "keras": "numpy",
    "tensorflow-cpu": "numpy",
    "torch": "numpy",
}
"""A module that a package brings with it."""
IF_THERE = {"examples/guides/04_gpu_accelerators.py": {"torch"}}
"""What a program uses only where it is installed."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_program_imports_what_its_line_installs_and_the_standard_library(program: Path) -> None:
    name = program.relative_to(ROOT).as_posix()
    assert imported(program) - IF_THERE.get(name, set()) - set(sys.stdlib_module_names) - installed(program) == set()


def imported(program: Path) -> set[str]:
    modules = set[str]()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module))
    return {module.partition(".")[0] for module in modules}


def installed(program: Path) -> set[str]:
    """Return the modules that the program's line installs."""
    ours, *packages = wanted(program)
    extras = set(re.findall(r"[\w]+", ours))
    for extra in [*extras]:
        packages += EXTRAS[extra]
        extras |= set(re.findall(r"\w+", EXTRAS[extra][0].partition("[")[2].partition("]")[0]))
    for extra in extras:
        packages += EXTRAS[extra]
    names = {re.split(r"[\s<>=;]", package)[0] for package in packages}
    modules = {MODULES.get(bare, bare) for name in names for bare in [name.partition("[")[0]]}
    return (
        modules
        | {BROUGHT[name] for name in names & BROUGHT.keys()}
        | {module for module, extra in OURS.items() if not extra or extra in extras}
    )


def test_the_line_of_a_program_without_one_is_that_of_the_package() -> None:
    assert {path.name for path in PROGRAMS if wanted(path) == ["."]} >= {"plain_map.py", "asyncio_tasks.py"}
