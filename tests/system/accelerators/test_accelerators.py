"""Accelerators: spellings, meanings, MIG partitions, and refusals with their advice.

Expected values are the tables of the reference (seeds 001 and 003), except where the vendors contradict them: there is
no 40 GB H100, a B200 has 180 GB, one GPU of a GB200 186 GB. Profiles and counts are those of NVIDIA's MIG user guide.
"""

import subprocess
import sys
from pathlib import Path

from skyward_core import accelerators


def test_the_import_loads_few_modules():
    """A new interpreter loads only the standard library and this package. It loads difflib only for a refusal."""
    root = Path(accelerators.__file__).parents[2]
    program = f"import sys; sys.path.insert(0, {str(root)!r}); before = {{*sys.modules}}; import skyward_core.accelerators; print(*({{*sys.modules}} - before))"
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "skyward_core.accelerators.mig" in loaded
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"skyward_core"}
    assert "difflib" not in loaded
