"""Two notebooks in real kernels, run by nbclient: the display, interrupted cells, asyncio, and a kernel that is killed."""

import re

import pytest

from tests.system.test_notebooks import (  # noqa: F401 - fixtures
    CALLS,
    CELLS,
    Ran,
    ran,
)


@pytest.mark.timeout(400)
def test_a_pool_is_one_output_below_the_cell_that_opened_it(ran: Ran) -> None:
    """It ends with the calls and the cost, although other cells have run since; other cells have no output of it."""
    (final,) = ran.displayed("open")
    assert re.search(r"^done: .* s, \$0\.\d+ \(1 on demand\)", final["text/plain"])
    assert f"{CALLS + 4} of {CALLS + 7} calls, 3 cancelled" in final["text/plain"]
    assert final["text/html"].startswith("<div><b>skyward</b> done: ")
    assert [cell for cell in CELLS if ran.displayed(cell)] == [
        "open",
        "interrupted with",
        "interrupted opening",
        "async with",
        "open the last",
    ]
