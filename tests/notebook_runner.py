"""Runs the cells that stdin has as JSON in one kernel, and prints their outputs; for `test_notebooks.py`.

Whenever a cell makes the file `interrupt`, the kernel gets SIGINT, as Jupyter's stop button sends it; the file `kill`
is SIGKILL.
"""

import collections
import json
import signal
import sys
import threading
from pathlib import Path

import nbformat
from jupyter_client.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

counts: collections.Counter[str] = collections.Counter()


class Recording(NotebookClient):
    """Counts the messages that it gets, by type."""

    def process_message(self, msg, cell, cell_index):
        counts[msg["header"]["msg_type"]] += 1
        return super().process_message(msg, cell, cell_index)


def watch(folder: Path, client: NotebookClient, ended: threading.Event) -> None:
    while not ended.wait(0.02):
        for name, number in (("interrupt", signal.SIGINT), ("kill", signal.SIGKILL)):
            if (folder / name).exists():
                (folder / name).unlink()
                run_sync(client.km.signal_kernel)(number)


def main() -> None:
    cells, folder = json.load(sys.stdin), Path(sys.argv[1])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = Recording(notebook, timeout=300, startup_timeout=300, allow_errors=True, kernel_name="python3")
    ended = threading.Event()
    watching = threading.Thread(target=watch, args=(folder, client, ended))
    watching.start()
    try:
        client.execute()
        is_dead = False
    except DeadKernelError:
        is_dead = True
    finally:
        ended.set()
        watching.join()
    outputs = [cell.outputs for cell in notebook.cells]
    print(json.dumps({"outputs": outputs, "counts": counts, "is_dead": is_dead}))


if __name__ == "__main__":
    main()
