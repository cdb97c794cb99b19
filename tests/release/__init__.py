"""`make release`: build the wheel and the sdist of HEAD, check them, and describe them, in `dist/`.

The version is that of the git tag (`v0.1.0`). The build sees a clone of HEAD, its clock is the commit's, and the build
backend is that of uv.lock, so that the same commit gives the same bytes. docs/decisions/0043-releases.md has the
reasons.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uv
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from tests.versions import MINORS, constraints

ROOT = Path(__file__).parents[2]
NAME = "skyward-core"
PACKAGES = {
    "skyward_core": "skyward_core",
    "prefect_skyward": "integrations/prefect_skyward",
    "airflow_provider_skyward": "integrations/airflow_provider_skyward",
    "dagster_skyward": "integrations/dagster_skyward",
}
"""Each import package of the wheel, and its folder in the repository."""
SDIST_ALSO = {".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"}
"""What the sdist has beside the packages, and beside the PKG-INFO that the backend writes."""


class NotReleasable(Exception):
    """Why this commit, or what was built of it, cannot be a release."""


def release(root: Path, out: Path) -> Version:
    """Build HEAD of the repository `root` into the folder `out`, which is replaced, and return the version.

    Raises:
        NotReleasable: something is not committed, or a check failed; `out` is as it was.
    """
    if changes := _git(root, "status", "--porcelain"):
        raise NotReleasable(f"not committed:\n{changes}")
    commit = _git(root, "rev-parse", "HEAD")
    epoch = int(_git(root, "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="skyward-release-") as folder:
        tree, built = Path(folder) / "tree", Path(folder) / "dist"
        _git(root, "clone", "--quiet", "--no-checkout", str(root), str(tree))
        _git(tree, "checkout", "--quiet", "--detach", commit)
        wheel, sdist = _built(tree, built, epoch)
        version = checked(wheel, sdist, tree)
        _twine_check(wheel, sdist)
        _check_changes(tree, version)
        bom = sbom(_exported(tree, "--all-extras"), _exported(tree), version, epoch)
        _validate(bom)
        (built / f"{wheel.name.partition('-py3-')[0]}.cdx.json").write_text(bom)
        _copy_constraints(tree, built)
        _write_sums(built)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(built, out)
    return version


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _uv(*words: str, environ: Mapping[str, str] | None = None) -> str:
    """Run the uv of uv.lock; it starts the Python that runs this."""
    variables = os.environ | {"UV_PYTHON": sys.executable} | dict(environ or {})
    command = [uv.find_uv_bin(), "--quiet", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"uv {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _built(tree: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist; return the paths of wheel and sdist."""
    pins = tree.with_name("build-constraints.txt")
    flags = ["--locked", "--only-group", "release", "--no-header", "--no-annotate"]
    pins.write_text(_uv("export", "--project", str(tree), *flags))
    flags = ["--build-constraints", str(pins), "--require-hashes", "--out-dir", str(out)]
    _uv("build", *flags, str(tree), environ={"SOURCE_DATE_EPOCH": str(epoch)})
    (out / ".gitignore").unlink(missing_ok=True)  # uv writes it
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def checked(wheel: Path, sdist: Path, tree: Path) -> Version:
    """Check that wheel and sdist hold the files of the clone `tree` that they should, and no others; return the version."""
    _, version, _, _ = parse_wheel_filename(wheel.name)
    _, of_sdist = parse_sdist_filename(sdist.name)
    tags = {tag.removeprefix("v") for tag in _git(tree, "tag", "--points-at", "HEAD", "v*").split()}
    if of_sdist != version or (tags and str(version) not in tags):
        raise NotReleasable(f"the wheel is {version}, the sdist {of_sdist}, the tag {', '.join(tags) or 'missing'}")
    committed = _git(tree, "ls-files").splitlines()
    homes = {f"{home}/": f"{package}/" for package, home in PACKAGES.items()}
    of_packages = {name: home for name in committed for home in homes if name.startswith(home)}
    info = f"{NAME.replace('-', '_')}-{version}.dist-info"
    made = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    ours = {homes[home] + name.removeprefix(home) for name, home in of_packages.items()}
    with zipfile.ZipFile(wheel) as archive:
        _compare(wheel, archive.namelist(), ours | made)
    top = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    if links := [one.name for one in members if not one.isfile()]:
        raise NotReleasable(f"{sdist.name}: {', '.join(links)}: only plain files are allowed")
    expected = {f"{top}/{name}" for name in {*of_packages, *SDIST_ALSO, "PKG-INFO"}}
    _compare(sdist, [one.name for one in members], expected)
    return version


def _compare(path: Path, found: Sequence[str], expected: set[str]) -> None:
    missing, surplus = sorted(expected.difference(found)), sorted(set(found) - expected)
    if missing or surplus or len(found) != len(expected):
        raise NotReleasable(f"{path.name}: missing {missing}, too much {surplus}")


def _twine_check(*paths: Path) -> None:
    """Ask twine whether PyPI can read the metadata and show the README; a warning counts."""
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"twine check: {done.stdout}{done.stderr}")


def _check_changes(tree: Path, version: Version) -> None:
    """A release has its section in CHANGELOG.md; what is built between two releases has none yet."""
    is_release = not (version.is_devrelease or version.local)
    if is_release and f"\n## [{version}]" not in (tree / "CHANGELOG.md").read_text():
        raise NotReleasable(f"CHANGELOG.md has no section [{version}]")


def _copy_constraints(tree: Path, out: Path) -> None:
    for minor in MINORS:
        file = tree / "skyward_core" / f"constraints-{minor}.txt"
        if file.read_text() != constraints(minor, tree):
            raise NotReleasable(f"{file.name} is not that of uv.lock: run `make constraints`")
        shutil.copy(file, out)


def _write_sums(out: Path) -> None:
    """Write the SHA-256 of each file, as `sha256sum --check` reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(lines))


def _exported(tree: Path, *flags: str) -> dict[str, Any]:
    command = ["export", "--project", str(tree), "--locked", "--no-dev", "--format", "cyclonedx1.5"]
    return json.loads(_uv(*command, *flags))


def sbom(everything: Mapping[str, Any], required: Mapping[str, Any], version: Version, epoch: int) -> str:
    """Return the CycloneDX document of a release: uv's export with all extras, `everything`, completed.

    uv leaves out the version of the project, and draws a new serial number at each export. Packages that are not in
    `required`, the export without extras, are marked as optional.
    """
    always = {component["purl"] for component in required["components"]}
    components = [
        {**component, "scope": "required" if component["purl"] in always else "optional"}
        for component in everything["components"]
    ]
    ours = f"pkg:pypi/{NAME}@{version}"
    metadata = everything["metadata"] | {
        "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "component": {**everything["metadata"]["component"], "version": str(version), "purl": ours},
    }
    completed = {
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, ours).urn,
        "metadata": metadata,
        "components": components,
    }
    return json.dumps({**everything, **completed}, indent=2) + "\n"


def _validate(text: str) -> None:
    """Check the document by the schema of CycloneDX."""
    # only the environment of `make release` has this package
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.V1_5).validate_str(text):
        raise NotReleasable(f"the bill of materials: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check HEAD; return 1, with the reason on stderr, if it cannot be a release."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository; default: this one")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder to replace; default: dist")
    asked = parser.parse_args(argv)
    try:
        version = release(asked.root, asked.out)
    except NotReleasable as failure:
        print(failure, file=sys.stderr)
        return 1
    for path in sorted(asked.out.iterdir()):
        print(path)
    if version.is_devrelease or version.local:
        print(f"{version} is no release: HEAD has no tag such as v1.2.3")
    return 0
