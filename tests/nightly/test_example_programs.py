"""Every program of examples/ runs on this machine, as its users run it, and prints its result.

Most run in tests/system. Those that train with a framework run in `make frameworks`. (Flows and DAGs: `test_examples.py`.)
"""

from pathlib import Path

import pytest

from tests.system.test_example_programs import GUIDES, IN_STEPS, WITH_FRAMEWORKS, assert_printed, printed_by


@pytest.mark.timeout(450)
@pytest.mark.parametrize("program", GUIDES)
def test_a_guide_prints_its_result(program: str) -> None:
    assert_printed(GUIDES[program], printed_by(program))


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", WITH_FRAMEWORKS)
def test_a_training_prints_its_result(program: str) -> None:
    assert_printed(WITH_FRAMEWORKS[program], printed_by(program))


@pytest.mark.frameworks
@pytest.mark.timeout(900)
def test_the_training_with_checkpoints_goes_on_where_it_was(tmp_path: Path) -> None:
    for begun_at in (0, 100):
        said = printed_by(IN_STEPS, str(tmp_path))
        assert_printed([rf"rank {rank}: from step {begun_at} to 120, loss 0\.000" for rank in range(2)], said)
