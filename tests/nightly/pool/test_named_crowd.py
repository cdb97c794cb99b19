"""Many processes open one name at the same moment: exactly one rents, and all calls are right.

Run as a program, this file forks the processes. `CROWD=30` sets how many they are; a hundred need 30 s of a processor.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from tests.pool.named import double, name, pool_of, rentals  # noqa: F401 - a fixture

CROWD = int(os.environ.get("CROWD", "100"))
REPOSITORY = Path(__file__).parents[3]


@pytest.mark.timeout(900)
def test_of_many_processes_at_once_exactly_one_rents(name: str, tmp_path: Path) -> None:
    before = set(rentals())  # those of other tests in this process
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__, name, str(CROWD), str(tmp_path)]
    subprocess.run(command, env=environ, check=True, timeout=800)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [one["error"] for one in found if one["error"]] == []
    assert sorted(one["result"] for one in found) == [2 * number for number in range(CROWD)]
    rented = set(rentals()) - before
    assert len(rented) == 1
    assert {one["id"] for one in found} == rented
    seconds = sorted(one["seconds"] for one in found)
    print(f"{CROWD} processes, first results after {seconds[0]:.1f} to {seconds[-1]:.1f} s")


def main() -> None:
    """Fork the processes, let all of them begin at once, and close when all have called."""
    name, crowd, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    __import__("skyward_core.engine.cluster")
    __import__("skyward_core.ledger.ledger")
    begin, called, leave = os.pipe(), os.pipe(), os.pipe()
    for number in range(crowd):
        if os.fork() == 0:
            for pipe in (begin, leave):
                os.close(pipe[1])
            status = 1
            try:
                status = _use(name, number, folder, begin[0], called[1], leave[0])
            finally:
                os._exit(status)
    os.close(called[1])
    os.close(begin[1])  # all wait for the end of this pipe
    for _ in range(crowd):
        os.read(called[0], 1)
    os.close(leave[1])
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(crowd)]
    sys.exit(any(statuses))


def _use(name: str, number: int, folder: Path, begin: int, called: int, leave: int) -> int:
    """Open, call, wait until all have called, and close; write down what came of it."""
    found = {"id": "", "result": -1, "seconds": 0.0, "error": ""}
    os.read(begin, 1)
    began = time.monotonic()
    is_counted = False
    try:
        with pool_of(name, provision_timeout=600) as pool:
            found |= {"id": pool.id, "result": double(number) >> pool, "seconds": time.monotonic() - began}
            is_counted = os.write(called, b"1") == 1
            os.read(leave, 1)
    except BaseException:
        found["error"] = traceback.format_exc()
        if not is_counted:
            os.write(called, b"1")
    (folder / f"{number}.json").write_text(json.dumps(found))
    return int(bool(found["error"]))


if __name__ == "__main__":
    main()
