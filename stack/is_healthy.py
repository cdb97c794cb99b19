"""Exit with 0 if a service answers: `python is_healthy.py URL [COMPONENT]`.

With a component the answer is JSON, and its part of that name must have the status "healthy".
"""

import json
import sys
import urllib.request

LONGEST_SECONDS = 8


def is_healthy(url: str, component: str = "") -> bool:
    with urllib.request.urlopen(url, timeout=LONGEST_SECONDS) as answer:  # noqa: S310 - the URL is that of the compose file
        return not component or json.load(answer)[component]["status"] == "healthy"


if __name__ == "__main__":
    try:
        sys.exit(not is_healthy(*sys.argv[1:]))
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
