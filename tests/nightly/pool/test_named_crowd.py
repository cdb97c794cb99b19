"""Many processes open one name at the same moment: exactly one rents, and all calls are right.

Run as a program, this file forks the processes. `CROWD=30` sets how many they are; a hundred need 30 s of a processor.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.pool.named import double, name, pool_of, rentals  # noqa: F401 - a fixture

CROWD = int(os.environ.get("CROWD", "100"))
REPOSITORY = Path(__file__).parents[3]


@pytest.mark.timeout(900)
def test_of_many_processes_at_once_exactly_one_rents(name: str, tmp_path: Path) -> None:
    before = set(rentals())  # those of other tests in this process
    command = [sys.executable, "-m", "tests.nightly.pool.test_named_crowd", name, str(CROWD), str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=800)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [one["error"] for one in found if one["error"]] == []
    assert sorted(one["result"] for one in found) == [2 * number for number in range(CROWD)]
    rented = set(rentals()) - before
    assert len(rented) == 1
    assert {one["id"] for one in found} == rented


def main(name: str, crowd: int, folder: Path) -> None:
    """Fork the processes, let all of them begin at once, and close when all have called."""
    __import__("skyward_core.engine.cluster")
    __import__("skyward_core.ledger.ledger")
    begin, called, leave = os.pipe(), os.pipe(), os.pipe()
    for number in range(crowd):
        if os.fork() == 0:
            os.close(begin[1])
            os.close(leave[1])
            try:
                _use(name, number, folder, begin[0], called[1], leave[0])
            finally:
                os._exit(0)
    os.close(called[1])
    os.close(begin[1])  # all wait for the end of this pipe
    for _ in range(crowd):
        os.read(called[0], 1)
    os.close(leave[1])
    for _ in range(crowd):
        os.wait()


def _use(name: str, number: int, folder: Path, begin: int, called: int, leave: int) -> None:
    """Open, call, wait until all have called, and close; write down what came of it."""
    found = {"id": "", "result": -1, "error": ""}
    os.read(begin, 1)
    try:
        with pool_of(name, provision_timeout=600) as pool:
            found |= {"id": pool.id, "result": double(number) >> pool}
            os.write(called, b"1")
            os.read(leave, 1)
    except BaseException:
        found["error"] = traceback.format_exc()
        os.write(called, b"1")
    (folder / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
