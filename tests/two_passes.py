"""`python -m tests.two_passes -n 5 ARGUMENTS`: run pytest in parallel, then once more what failed, alone.

The second pass runs in one process, one test after the other, when nothing else of the run needs the processors. What
passes only then is listed under "passed when run alone": it is looked at the same day. The exit code is that of the
second pass. More than ten failures in the first pass fail the run without a second.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS_FAILED = 1
"""pytest's exit code for a run that is complete, in which tests failed."""
MOST_RETRIED = 10
"""With more failures than this the machine is not the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run both passes; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.two_passes", description=__doc__)
    parser.add_argument("-n", "--at-once", default="auto", help="the number of test processes of the first pass")
    options, arguments = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory(prefix="two-passes-") as cache:
        run = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
        code = subprocess.run([*run, "-n", options.at_once], check=False).returncode
        failed = failures(Path(cache))
        if code != TESTS_FAILED or len(failed) > MOST_RETRIED:
            return code
        print(f"\n── second pass: {len(failed)} of these tests once more, alone", flush=True)
        code = subprocess.run(
            [*run, "-n", "0", "--last-failed", "--last-failed-no-failures=none"], check=False
        ).returncode
        if passed := failed - failures(Path(cache)):
            print("\npassed when run alone:", *sorted(passed), sep="\n  ", flush=True)
        return code


def failures(cache: Path) -> set[str]:
    """Return the ids of the tests that failed in the last run with this cache folder."""
    found = cache / "v/cache/lastfailed"
    return set(json.loads(found.read_text())) if found.exists() else set()


if __name__ == "__main__":
    sys.exit(main())
