"""Every code block of the user's documents runs as it stands there, or is refused with a message that says what to
write.

`seed_blocks.txt` has the blocks, each with the number of its document (shared/seeds: 000 the guide to accelerators, 001
their reference, 002 and 004 the introductions, 003 the API) and its line. The documents import `skyward`; that name is
`skyward_core` here. Blocks that open a pool run on this machine.
"""

import types
from typing import Any

import pytest

from tests.system.test_seed_blocks import on_this_machine
from tests.unit.test_seed_blocks import (  # noqa: F401 - fixtures
    WITH_TORCH,
    run,
    skyward,
)


class Model:
    def cuda(self) -> "Model":
        return self

    def fit(self, data: list[int]) -> int:
        return sum(data)


@pytest.mark.frameworks
@pytest.mark.parametrize("key", WITH_TORCH)
def test_a_block_runs_with_pytorch(key: str, skyward: types.ModuleType) -> None:
    from torch.utils.data import DataLoader

    on_this_machine(skyward)
    steps: list[Any] = []
    names = {"create_model": Model, "my_data": [1, 2, 3], "dataset": [1, 2, 3], "DataLoader": DataLoader}
    found = run(key, **names, epochs=2, train_step=steps.append)
    match key:
        case "003:443":
            assert sorted(found["sampler"]) == [0, 1, 2]
        case "003:462":
            assert sorted(step.item() for step in steps) == [1, 1, 2, 2, 3, 3]
        case _:
            assert found["result"] == 6
