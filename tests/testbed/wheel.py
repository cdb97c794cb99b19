"""A wheel by which a host uses packages of this machine."""

import zipfile
from collections.abc import Sequence
from pathlib import Path


def wheel_that_shows(packages: Sequence[Path], folder: Path) -> Path:
    """Write a wheel that adds folders of packages to the environment in which it is installed."""
    path = folder / "packages_of_the_tests-1-py3-none-any.whl"
    about = "packages_of_the_tests-1.dist-info"
    files = {
        "packages_of_the_tests.pth": "".join(f"{one}\n" for one in packages),
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: packages-of-the-tests\nVersion: 1\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path
