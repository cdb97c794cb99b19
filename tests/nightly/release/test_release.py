"""A release: the bytes depend on the commit only, the version on the tag, and the bill of materials on uv.lock."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uv

from tests.release import NotReleasable, checked, release
from tests.versions import ROOT

pytestmark = [pytest.mark.timeout(600)]

IN_RELEASE = ["run", "--locked", "--exact", "--only-group", "release", "python", "-m"]
"""What `make release` gives uv; the test below compares."""
STEM = "skyward_core-1.2.3"


@dataclass
class Place:
    """A repository with the files of this one, whose HEAD has the tag v1.2.3, and the environment of the recipe."""

    tree: Path
    environment: Path

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=Tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", "-C", str(self.tree), *who, *words], text=True)

    def run(self, *words: str, umask: int = 0o022, **environ: str) -> str:
        """Run a module in the environment of the recipe, and return its stdout."""
        variables = os.environ | {"UV_PROJECT_ENVIRONMENT": str(self.environment), "UV_COMPILE_BYTECODE": "0"} | environ
        command = [uv.find_uv_bin(), "--quiet", "--project", str(ROOT), *IN_RELEASE, *words]
        done = subprocess.run(
            command, cwd=ROOT, env=variables, umask=umask, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("release")
    place = Place(folder / "tree", folder / "venv")
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and os.path.lexists(ROOT / name):
            (place.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place.tree / name, follow_symlinks=False)
    changes = place.tree / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## [Unreleased]\n", "## [Unreleased]\n\n## [1.2.3] - 2026-11-26\n"))
    place.git("init", "--quiet", "--initial-branch=main")
    place.git("add", "--all")
    place.git("commit", "--quiet", "--message=All", "--date=2026-11-26T12:00:00Z")
    place.git("tag", "v1.2.3")
    return place


@pytest.fixture(scope="module")
def built(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the recipe has written for the tag."""
    out = tmp_path_factory.mktemp("built") / "dist"
    said = place.run("tests.release", "--root", str(place.tree), "--out", str(out))
    assert "no release" not in said
    return out


def test_a_release_has_seven_files_and_their_sums(built: Path) -> None:
    constraints = ["constraints-3.12.txt", "constraints-3.13.txt"]
    named = [*constraints, f"{STEM}-py3-none-any.whl", f"{STEM}.cdx.json", f"{STEM}.tar.gz"]
    assert sorted(path.name for path in built.iterdir()) == ["SHA256SUMS", *named]
    lines = [f"{hashlib.sha256((built / name).read_bytes()).hexdigest()}  {name}\n" for name in named]
    assert (built / "SHA256SUMS").read_text() == "".join(lines)
    for name in constraints:
        assert (built / name).read_bytes() == (ROOT / "skyward_core" / name).read_bytes()


def test_two_builds_of_a_commit_are_the_same_bytes(place: Place, built: Path, tmp_path: Path) -> None:
    """Also in another folder, with another umask, time zone and seed of hashes; files have other times there."""
    other = Place(tmp_path / "other" / "tree", place.environment)
    shutil.copytree(place.tree, other.tree, symlinks=True, copy_function=shutil.copy)
    for name in ("skyward_core/__init__.py", "README.md"):
        os.utime(other.tree / name, (1_000_000_000, 1_000_000_000))
    out = tmp_path / "dist"
    elsewhere: Any = {"umask": 0o077, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    other.run("tests.release", "--root", str(other.tree), "--out", str(out), **elsewhere)
    found, expected = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (out, built))
    assert found == expected


def needed(lock: dict[str, Any], with_extras: bool) -> dict[tuple[str, str], set[str]]:
    """Return the packages that ours needs by uv.lock, by name and version, with the hashes of their files."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for package in lock["package"]:
        by_name.setdefault(package["name"], []).append(package)
    (ours,) = by_name["skyward-core"]
    todo = list(ours["dependencies"])
    todo += [one for extra in ours["optional-dependencies"].values() for one in extra] if with_extras else []
    seen: set[tuple[str, str, tuple[str, ...]]] = set()
    found: dict[tuple[str, str], set[str]] = {}
    while todo:
        asked = todo.pop()
        for package in by_name[asked["name"]]:
            key = (package["name"], package.get("version", ""), tuple(asked.get("extra", ())))
            if package is ours or asked.get("version", key[1]) != key[1] or key in seen:
                continue
            seen.add(key)
            files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
            found[key[:2]] = {file["hash"].removeprefix("sha256:") for file in files}
            todo += package.get("dependencies", ())
            for extra in key[2]:
                todo += package.get("optional-dependencies", {}).get(extra, ())
    return found


def test_the_bill_names_each_runtime_dependency_once(built: Path) -> None:
    bill = json.loads((built / f"{STEM}.cdx.json").read_text())
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    with_extras, always = needed(lock, with_extras=True), needed(lock, with_extras=False)
    components = bill["components"]
    names = [(one["name"], one["version"]) for one in components]
    assert sorted(names) == sorted(with_extras)
    assert {"prefect", "apache-airflow", "dagster", "dask"} <= {name for name, _ in names}
    assert not {"pytest", "twine", "ruff"} & {name for name, _ in names}
    for one in components:
        files = {entry["content"] for file in one["externalReferences"] for entry in file["hashes"]}
        assert files == with_extras[one["name"], one["version"]]
        assert one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
    assert {(one["name"], one["version"]) for one in components if one["scope"] == "required"} == set(always)
    ours = bill["metadata"]["component"]
    assert (ours["name"], ours["version"]) == ("skyward-core", "1.2.3")


def test_what_is_not_committed_is_no_release(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    (out / "earlier").touch()
    (place.tree / "new.txt").touch()
    try:
        with pytest.raises(NotReleasable, match=r"not committed:\n\?\? new\.txt"):
            release(place.tree, out)
    finally:
        (place.tree / "new.txt").unlink()
    assert (out / "earlier").exists()


def test_a_wheel_or_an_sdist_with_other_files_is_refused(place: Place, built: Path, tmp_path: Path) -> None:
    wheel, sdist = built / f"{STEM}-py3-none-any.whl", built / f"{STEM}.tar.gz"
    assert str(checked(wheel, sdist, place.tree)) == "1.2.3"
    larger, changed = tmp_path / wheel.name, tmp_path / sdist.name
    shutil.copy(wheel, larger)
    with zipfile.ZipFile(larger, "a") as archive:
        archive.writestr("skyward_core/secret.env", "")
    with pytest.raises(NotReleasable, match=r"too much \['skyward_core/secret.env'\]"):
        checked(larger, sdist, place.tree)
    with tarfile.open(sdist) as whole, tarfile.open(changed, "w:gz") as archive:
        for one in whole.getmembers():
            if not one.name.endswith("/py.typed"):
                archive.addfile(one, whole.extractfile(one))
        archive.addfile(tarfile.TarInfo(f"{STEM}/secret.env"))
    with pytest.raises(
        NotReleasable, match=r"missing \['[^']+/py\.typed'.*too much \['skyward_core-1\.2\.3/secret\.env'\]"
    ):
        checked(wheel, changed, place.tree)
    renamed = shutil.copy(wheel, tmp_path / "skyward_core-1.2.4-py3-none-any.whl")
    with pytest.raises(NotReleasable, match=r"the wheel is 1\.2\.4, the sdist 1\.2\.3, the tag 1\.2\.3"):
        checked(renamed, sdist, place.tree)
