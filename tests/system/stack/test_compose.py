"""docker-compose.yml is valid and safe, and says of each service how it runs without containers."""

import subprocess

from tests.stack.compose import ROOT


def test_the_scripts_of_the_stack_are_valid() -> None:
    """bash reads the script of a node without an error."""
    done = subprocess.run(["bash", "-n", ROOT / "stack/node.sh"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
