"""See the package."""

import sys

from tests.release import main

sys.exit(main())
