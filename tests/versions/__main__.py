"""See the package."""

import sys

from tests.versions import main

sys.exit(main())
