"""A fake `nvidia-smi` for GPUs that can be partitioned.

This file is copied onto a host's PATH under that name, with its state beside it as JSON.

    gpus = install(host.root / "usr/local/bin", count=2)
    gpus.set(refuses_reset=True)
    assert gpus.modes == ["Disabled", "Disabled"]

It takes the arguments of the real command, keeps the real placement rules (`accelerators.mig`), and prints the output
that the MIG User Guide shows. Where the real one has a choice, it chooses the worst. A profile gets the last free
place, so that small profiles made first block large ones.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHEBANG = f"#!{'/usr/bin/python3' if os.path.exists('/usr/bin/python3') else '/usr/bin/env -S python3'} -SEB\n"
"""The system's own Python, which hosts also have; a shim of the user's would take ten times as long."""
NAME, MIB = "NVIDIA H100 80GB HBM3", int(80e9 / 2**20)
OPTIONS: dict[str, Any] = {
    "needs_reset": False,  # the mode changes with a reset only, as on an A100
    "refuses_reset": False,
    "fails": "",  # an option, such as "-cgi": the command does nothing and fails
    "hangs": "",  # the command does nothing, for ever
    "hides": 0,  # so many partitions of each GPU are not listed
    "seconds": 0.0,  # how long a command takes before it changes something
    "stops_at": 0,  # the first, second, ... command that changes something ...
    "stops_when": "before",  # ... before or after it has
    "stops_by": "",  # ... runs this shell command; "" kills its process group
}


class Gpus:
    """The GPUs of one machine, seen from outside."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "nvidia-smi"
        self._state = folder / "nvidia-smi.json"

    def set(self, gpu: int | None = None, **values: Any) -> None:
        """Change OPTIONS, or values of one GPU: `processes`, a list of (pid, name), `current` and `pending`."""
        with _locked(self._state) as state:
            (state if gpu is None else state["gpus"][gpu]).update(values)

    @property
    def modes(self) -> list[str]:
        """The MIG mode of each, with the pending one if it differs."""
        return [
            gpu["current"] if gpu["current"] == gpu["pending"] else f"{gpu['current']} (pending {gpu['pending']})"
            for gpu in self._now["gpus"]
        ]

    @property
    def partitions(self) -> list[list[str]]:
        """The profiles of the GPU instances of each, in the order of their creation."""
        return [[instance["profile"] for instance in gpu["instances"]] for gpu in self._now["gpus"]]

    @property
    def uuids(self) -> list[str]:
        """The devices that a program can use: the UUIDs of the partitions, GPU by GPU."""
        return [
            instance["uuid"] for gpu in self._now["gpus"] for instance in gpu["instances"] if instance["is_computing"]
        ]

    @property
    def changes(self) -> list[str]:
        """The commands so far that had to change something."""
        return self._now["changes"]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command on this machine, as another program would."""
        return subprocess.run(
            [sys.executable, "-S", str(self.program), *words], capture_output=True, text=True, check=True
        )

    @property
    def _now(self) -> dict[str, Any]:
        with _locked(self._state) as state:
            return state


def install(folder: Path, *, count: int = 1, **options: Any) -> Gpus:
    """Put `nvidia-smi` into a folder of programs, with this many whole H100. `options` are those of OPTIONS."""
    from skyward_core.accelerators.mig import profiles

    gpus = Gpus(folder)
    whole = {"name": NAME, "mib": MIB, "current": "Disabled", "pending": "Disabled", "instances": [], "processes": []}
    state = {
        "gpus": [{**whole, "uuid": _uuid("GPU")} for _ in range(count)],
        "profiles": {profile.name: [profile.width, profile.starts] for profile in profiles("H100", 80)},
        "changes": [],
        **OPTIONS,
        **options,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia-smi.json").write_text(json.dumps(state))
    gpus.program.write_text(SHEBANG + Path(__file__).read_text())
    gpus.program.chmod(0o755)
    return gpus


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Any]:
    """Lock the state, and write it back afterwards if it has changed."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        state = json.loads(text)
        try:
            yield state
        finally:
            if (new := json.dumps(state)) != text:
                file.seek(0)
                file.truncate()
                file.write(new)
                file.flush()


def _uuid(kind: str) -> str:
    return f"{kind}-{uuid.uuid4()}"


# ── the program ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Refused(Exception):
    """The end of a command: an exit code, and a text on stdout, where the real one prints most of its errors."""


def main(words: list[str]) -> int:
    """Do what `nvidia-smi WORDS` does."""
    path = Path(sys.argv[0]).with_name("nvidia-smi.json")
    change = next((word for word in words if word in ("-mig", "--gpu-reset", "-cgi", "-dci", "-dgi")), "")
    with _locked(path) as state:
        number = 0
        if change:
            state["changes"].append(" ".join(words))
            number = len(state["changes"])
        stops = state["stops_when"] if number and number == state["stops_at"] else ""
        fault = (
            "hangs" if change and state["hangs"] == change else "fails" if change and state["fails"] == change else ""
        )
        by, seconds = state["stops_by"], state["seconds"] if change else 0.0
    if fault == "hangs":
        signal.pause()
    if stops == "before":
        _stop(by)
    time.sleep(seconds)
    try:
        with _locked(path) as state:
            if fault == "fails":
                raise Refused(1, "Unknown Error")
            code = _do(words, state)
    except Refused as error:
        code, message = error.args
        print(message)
    if stops == "after":
        _stop(by)
    return code


def _stop(command: str) -> None:
    if not command:
        os.killpg(0, signal.SIGKILL)
    subprocess.run(["sh", "-c", command], check=False)
    raise SystemExit(1)


def _do(words: list[str], state: Any) -> int:
    gpus = state["gpus"]
    chosen = [gpus[int(words[words.index("-i") + 1])]] if "-i" in words else gpus
    query = next((word.partition("=")[2] for word in words if word.startswith("--query")), "")
    if "-L" in words:
        _list(gpus, state["hides"])
    elif "--query-compute-apps" in " ".join(words):
        print("".join(f"{pid}, {name}\n" for gpu in chosen for pid, name in gpu["processes"]), end="")
    elif query:
        for gpu in chosen:
            known = {"index": gpus.index(gpu), "name": gpu["name"], "memory.total": gpu["mib"]}
            known |= {"mig.mode.current": gpu["current"], "mig.mode.pending": gpu["pending"]}
            print(", ".join(str(known[field]) for field in query.split(",")))
    elif os.geteuid() != 0 and "FAKE_ROOT" not in os.environ:
        raise Refused(4, "Insufficient Permissions")
    elif "-mig" in words:
        for gpu in chosen:
            _set_mode(gpu, "Enabled" if words[words.index("-mig") + 1] == "1" else "Disabled", state, gpus.index(gpu))
        print("All done.")
    elif "--gpu-reset" in words:
        for gpu in chosen:
            _reset(gpu, state, gpus.index(gpu))
        print("All done.")
    elif words[:1] == ["mig"]:
        return _mig(words, chosen, state)
    else:
        raise Refused(2, f"Invalid combination of input arguments: {words}")
    return 0


def _list(gpus: Any, hidden: int) -> None:
    for index, gpu in enumerate(gpus):
        print(f"GPU {index}: {gpu['name']} (UUID: {gpu['uuid']})")
        computing = [instance for instance in gpu["instances"] if instance["is_computing"]]
        for device, instance in enumerate(computing[: len(computing) - hidden]):
            print(f"  MIG {instance['profile']:<11} Device {device:2}: (UUID: {instance['uuid']})")


def _set_mode(gpu: Any, mode: str, state: Any, index: int) -> None:
    if gpu["current"] == gpu["pending"] == mode:
        print(f"{mode} MIG Mode for GPU {index}")
    elif gpu["instances"] or (gpu["processes"] and not state["needs_reset"]):
        raise Refused(0, f"Unable to set MIG Mode for GPU {index}: In use by another client")
    elif state["needs_reset"]:
        gpu["pending"] = mode
        print(
            f"Warning: MIG mode is in pending {'enable' if mode == 'Enabled' else 'disable'} state for GPU {index}:In use by another client"
        )
    else:
        gpu["current"] = gpu["pending"] = mode
        print(f"{mode} MIG Mode for GPU {index}")


def _reset(gpu: Any, state: Any, index: int) -> None:
    if state["refuses_reset"] or gpu["processes"]:
        raise Refused(3, f"The following GPUs could not be reset:\n  GPU {index}: In use by another client")
    gpu["current"], gpu["instances"] = gpu["pending"], []


def _mig(words: list[str], chosen: Any, state: Any) -> int:
    enabled = [gpu for gpu in chosen if gpu["current"] == "Enabled"]
    if not enabled:
        raise Refused(6, "No MIG-enabled devices found.")
    for gpu in enabled:
        index, instances = state["gpus"].index(gpu), gpu["instances"]
        computing = [instance for instance in instances if instance["is_computing"]]
        if "-cgi" in words:
            for profile in words[words.index("-cgi") + 1].split(","):
                instances.append(_instance(gpu, profile, state, index, is_computing="-C" in words))
        elif "-lgi" in words and instances:
            print("| GPU instances:                                          |")
            for instance in instances:
                place = f"{instance['start']}:{state['profiles'][instance['profile']][0]}"
                print(f"|  {index:2}  MIG {instance['profile']:<12} {9:3} {instance['id']:8} {place:>11}     |")
        elif "-dci" in words and computing:
            if gpu["processes"]:
                raise Refused(19, f"Unable to destroy compute instances of GPU {index}: In use by another client")
            for instance in computing:
                instance["is_computing"] = False
        elif "-dgi" in words and instances:
            if computing:
                raise Refused(19, f"Unable to destroy GPU instances of GPU {index}: In use by another client")
            gpu["instances"] = []
        else:
            raise Refused(6, "No instances found: Not Found")
    return 0


def _instance(gpu: Any, profile: str, state: Any, index: int, *, is_computing: bool) -> dict[str, Any]:
    if profile not in state["profiles"]:
        raise Refused(2, f"Unable to create a GPU instance on GPU {index} using profile {profile}: Invalid Argument")
    width, starts = state["profiles"][profile]
    taken = {
        place
        for one in gpu["instances"]
        for place in range(one["start"], one["start"] + state["profiles"][one["profile"]][0])
    }
    free = [start for start in starts if not taken & set(range(start, start + width))]
    if not free:
        raise Refused(
            19, f"Unable to create a GPU instance on GPU {index} using profile {profile}: Insufficient Resources"
        )
    number = 1 + max((one["id"] for one in gpu["instances"]), default=0)
    print(f"Successfully created GPU instance ID {number:2} on GPU {index} using profile MIG {profile}")
    return {"id": number, "profile": profile, "start": max(free), "is_computing": is_computing, "uuid": _uuid("MIG")}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
