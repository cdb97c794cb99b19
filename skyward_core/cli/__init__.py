"""The `skyward` command. `skyward_core.cli:main` is its entry point; the others have the commands."""

from skyward_core.cli.app import main as main
from skyward_core.cli.printing import FAILED as FAILED
from skyward_core.cli.printing import TO_DO as TO_DO
