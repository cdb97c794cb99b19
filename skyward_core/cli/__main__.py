"""`python -m skyward_core.cli`: the `skyward` command."""

import sys

from skyward_core.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
