"""A fake hierarchy of control groups (cgroup v2): real folders, with the files of the kernel kept separately.

It refuses what the kernel refuses (cgroups(7)): a group that passes controllers on takes no process, and a group with
processes passes none on. Controllers that were not passed on have no files. Processes are in the last group that they
were written to; `0` is the writer. Forks share the fake.
"""

import errno
import os
from pathlib import Path

MEMORY_FILES = {
    "memory.max": "max",
    "memory.oom.group": "0",
    "memory.swap.max": "max",
    "memory.events": "low 0\noom 0\noom_kill 0\n",
}


class FakeKernel:
    """Replaces `call_groups.read` and `write`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moved = 0

    def make(self, name: str, controllers: str = "memory pids", processes: str = "") -> Path:
        """Make a group by hand."""
        group = self.root / name
        group.mkdir(parents=True)
        self.put(group / "cgroup.controllers", controllers)
        self.put(group / "cgroup.procs", processes)
        return group

    def put(self, path: Path, text: str) -> None:
        """Set the content of a file."""
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def read(self, path: Path) -> str:
        """Return the content of a file, or its default if it was never written."""
        if not path.parent.exists():
            raise FileNotFoundError(path)
        if path.name.startswith("memory.") and "memory" not in self._handed_down(path.parent.parent):
            raise FileNotFoundError(path)
        file = self._file(path)
        return file.read_text() if file.exists() else MEMORY_FILES.get(path.name, "")

    def write(self, path: Path, text: str) -> None:
        """Do what the kernel does."""
        held = self.read(path)
        match path.name:
            case "cgroup.procs":
                if self._handed_down(path.parent):
                    raise OSError(errno.EBUSY, "it hands controllers down")
                self._enter(path, text.replace("0", str(os.getpid())) if text == "0" else text)
            case "cgroup.subtree_control":
                if self.read(path.parent / "cgroup.procs").split():
                    raise OSError(errno.EBUSY, "it has processes")
                self.put(path, f"{held} {text.removeprefix('+')}".strip())
            case _:
                self.put(path, text)

    def members(self, group: Path) -> set[int]:
        """The processes of a group."""
        return set(map(int, self.read(group / "cgroup.procs").split()))

    def _enter(self, path: Path, pid: str) -> None:
        self.moved += 1
        for file in self._files.glob("*cgroup.procs"):
            file.write_text(" ".join(word for word in file.read_text().split() if word != pid))
        self.put(path, f"{self.read(path)} {pid}")

    def _handed_down(self, group: Path) -> list[str]:
        file = self._file(group / "cgroup.subtree_control")
        return file.read_text().split() if file.exists() else []

    @property
    def _files(self) -> Path:
        return self.root.with_name(f"{self.root.name}.files")

    def _file(self, path: Path) -> Path:
        return self._files / str(path.relative_to(self.root)).replace("/", ":")
