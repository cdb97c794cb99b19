"""Each thread of ours is one of `concurrency.threads`, which knows what to do if it cannot start, or fails."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXCEPTIONS = {
    "skyward_core/concurrency/threads.py": "all others use its threads",
    "skyward_core/cleanup/reaper_process.py": "the reaper imports next to nothing, and does the work itself",
    "skyward_core/distributed/member.py": "on a node: a group without its threads fails, and the call with it",
    "skyward_core/engine/connection.py": "Dask's loop: it raises OSError, and the connection is made again",
    "skyward_core/worker/runner_process.py": "on a node: a worker without it ends, and its supervisor starts another",
    "integrations/dagster_skyward/pipes_node.py": "on a node: the step fails",
    "integrations/prefect_skyward/node_context.py": "on a node, at the end of its process",
}


def makes_threads(path: Path) -> bool:
    """Whether a module makes a `threading.Thread`, or a subclass of it."""
    tree = ast.parse(path.read_text())
    nodes = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    nodes += [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("Thread", "Timer"))
        or (isinstance(node, ast.Name) and node.id in ("Thread", "Timer"))
        for node in nodes
    )


def test_no_other_module_makes_threads() -> None:
    paths = [path for package in ("skyward_core", "integrations") for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 300
    assert {str(path.relative_to(ROOT)) for path in paths if makes_threads(path)} == set(EXCEPTIONS)
