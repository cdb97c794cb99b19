"""Small wheels for tests."""

import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str = "own_thing", *, found: str = "1") -> Path:
    """Write a wheel of one module with these values of FOUND and `__version__`; return its path."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": f"FOUND = __version__ = {found!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(zipfile.ZipInfo(file), text)  # without the time: the same content gives the same file
    return path
