"""Settings: the environment has priority over the file, the nearest file is used, and its schema is that of its reader."""

import logging
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import skyward_core as sky
from skyward_core.config.report import settings_schema
from skyward_core.config.settings import NOT_SETTINGS, Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "project" / "flows"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_the_environment_names_fields(project: Path) -> None:
    """SKYWARD_* are read as JSON if they are JSON, else as text; other variables are ignored."""
    environ = {
        "SKYWARD_PROVIDER": '{"name": "local", "price_per_hour": 2}',
        "SKYWARD_NODES": "3",
        "SKYWARD_ACCELERATOR": "A100",
        "SKYWARD_COLLECT_METRICS": "false",
        "NODES": "9",
    }
    settings = sky.Settings.read(environ, project)
    assert settings.fields == {
        "provider": {"name": "local", "price_per_hour": 2},
        "nodes": 3,
        "accelerator": "A100",
        "collect_metrics": False,
    }
    assert "SKYWARD_NODES" in settings.sources["nodes"]


def test_the_nearest_file_is_read(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the working directory upwards, then the one of the user's configuration directory; no other."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    places = (tmp_path / "config" / "skyward", project.parent, project)
    for nodes, folder in enumerate(places, 5):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "skyward.toml").write_text(f"nodes = {nodes}\n")
        settings = sky.Settings.read({}, project)
        assert settings.fields == {"nodes": nodes}
        assert settings.sources["nodes"] == str(folder / "skyward.toml")


def test_keywords_win_over_the_environment_and_that_over_the_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = '[provider]\nname = "local"\nprice_per_hour = 1.2\n'
    (project / "skyward.toml").write_text(f"nodes = 2\nconcurrency = 3\n{local}")
    monkeypatch.setenv("SKYWARD_NODES", "4")
    spec = sky.ComputePool(display="quiet", concurrency=1).spec
    assert (spec.nodes, spec.concurrency, spec.provider) == (4, 1, sky.Local(price_per_hour=1.2))
    spec = sky.ComputePool(provider=sky.Local(), nodes=1).spec
    assert (spec.nodes, spec.provider) == (1, sky.Local())


FILE = """
nodes = 2
concurrency = 3
[profiles.large]
nodes = 8
timeout = 60
[pools.nightly]
nodes = 4
retries = 1
"""


@pytest.mark.parametrize(
    ("profile", "pool", "nodes", "table"),
    [
        (None, None, 2, ""),
        ("large", None, 8, " [profiles.large]"),
        ("large", "nightly", 4, " [pools.nightly]"),
        ("large", "other", 8, " [profiles.large]"),
    ],
)
def test_a_pool_goes_before_a_profile_and_that_before_the_top(
    project: Path, profile: str | None, pool: str | None, nodes: int, table: str
) -> None:
    (project / "skyward.toml").write_text(FILE)
    settings = sky.Settings.read({}, project, profile=profile, pool=pool)
    assert (settings.fields["nodes"], settings.fields["concurrency"]) == (nodes, 3)
    assert settings.sources["nodes"] == f"{project / 'skyward.toml'}{table}"
    assert settings.fields.get("name") == ("nightly" if pool == "nightly" else None)
    assert settings.fields.get("timeout") == (60 if profile else None)


def test_a_pool_with_a_name_has_the_settings_of_its_table(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keywords have priority over them; a pool without a name, or with another one, does not have them."""
    (project / "skyward.toml").write_text(FILE)
    spec = sky.ComputePool(provider=sky.Local(), name="nightly", retries=0).spec
    assert (spec.nodes, spec.retries, spec.name) == (4, 0, "nightly")
    assert sky.ComputePool(provider=sky.Local()).spec.nodes == 2
    monkeypatch.setenv("SKYWARD_PROFILE", "large")
    assert sky.ComputePool(provider=sky.Local(), name="other").spec.nodes == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = \n", r"skyward\.toml.*line 1"),
        ("nodes = 2\n# caf\udce9\n", r"skyward\.toml: line 2 is not UTF-8"),
        (f"nodes = {'[' * 60_000}", r"skyward\.toml: its values are nested too deep"),
        ("[profiles.a]\nnode = 1\n", r"\[profiles\.a\]: there is no setting 'node'; did you mean 'nodes'"),
        ("[pools.a]\nnode = 1\n", r"\[pools\.a\]: there is no setting 'node'"),
        ("[pools.a]\nname = 'b'\n", r"\[pools\.a\]: the table's own name is that of the pool"),
        ("profiles = 3\n", r"write \[profiles\.NAME\]"),
        ("[pools]\nnodes = 3\n", r"write \[pools\.nodes\]"),
        ("[profile.a]\nnodes = 3\n", "did you mean 'profiles'"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(project: Path, text: str, message: str) -> None:
    (project / "skyward.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(sky.BadRequest, match=message):
        sky.Settings.read({}, project)


def test_an_unknown_profile_is_refused(project: Path) -> None:
    """With the nearest name of the file, and also if there is no file."""
    for name, message in (("", r"no skyward\.toml"), ("skyward.toml", "did you mean 'large'")):
        (project / (name or "other")).write_text(FILE)
        with pytest.raises(sky.BadRequest, match=message):
            sky.Settings.read({"SKYWARD_PROFILE": "larg"}, project)


@pytest.mark.parametrize("variable", ["SKYWARD_NODES", "SKYWARD_NODE"])
def test_a_wrong_variable_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    """A wrong value is refused; a misspelt name is refused, or logged with the nearest one."""
    monkeypatch.setenv(variable, "many")
    with caplog.at_level(logging.WARNING, logger="skyward"):
        try:
            sky.ComputePool(provider=sky.Local())
            assert variable == "SKYWARD_NODE"
            said = caplog.text
        except sky.BadRequest as error:
            said = str(error)
    assert "SKYWARD_NODES" in said


# ── the schema ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return settings_schema()


def test_the_schema_has_each_field_of_a_pool(schema: dict[str, Any]) -> None:
    """With the description and the default of `PoolSpec`, at the top, in profiles and in pools."""
    Draft202012Validator.check_schema(schema)
    fields = sky.PoolSpec.model_fields
    assert schema["properties"].keys() == {*fields, "profiles", "pools"}
    assert schema["properties"]["profiles"]["additionalProperties"]["properties"].keys() == fields.keys()
    assert schema["properties"]["pools"]["additionalProperties"]["properties"].keys() == fields.keys() - {"name"}
    for name, field in fields.items():
        assert schema["properties"][name]["description"] == field.description
    assert schema["properties"]["lease_seconds"]["default"] == 120


ACCEPTED = [
    "",
    "nodes = [1, 8]",
    "provider = 'local'",
    "provider = ['aws', {name = 'local', price_per_hour = 1.2}]",
    "accelerator = '4xA100'",
    "accelerator = {name = 'A100', count = 2}",
    "spot = 0.8",
    "spot = 'always'",
    "spot = {kind = 'always', retries = 2}",
    "secrets = ['HF_TOKEN']",
    "secrets = {HF_TOKEN = {source = 'env', key = 'OTHER'}}",
    "env = {A = 'b'}\nimage = {pip = ['numpy'], env = {A = '1'}}",
    "volume = [{mount_path = '/data', bucket = 'weather'}]",
    "[profiles.a]\nnodes = 3\n[pools.b]\nkeep_warm = 60",
]
REFUSED = [
    "node = 2",
    "nodes = 'many'",
    "provider = {name = 'local', price = 3}",
    "provider = {price_per_hour = 3}",
    "image = {pips = ['numpy']}",
    "spot = {kind = 'sometimes'}",
    "display = 'loud'",
    "lease_seconds = 1",
    "[pools.a]\nname = 'b'",
    "[profiles.a]\nnode = 2",
]


@pytest.mark.parametrize("text", [*ACCEPTED, *REFUSED])
def test_the_schema_accepts_what_the_reader_accepts(schema: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert Draft202012Validator(schema).is_valid(tomllib.loads(text)) == (text in ACCEPTED)
    (tmp_path / "skyward.toml").write_text(text)
    try:
        sky.PoolSpec.of(**sky.Settings.read({}, tmp_path).fields)
    except sky.BadRequest:
        assert text in REFUSED
    else:
        assert text in ACCEPTED


STRANGER = 61_001
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def _given(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def _linked(path: Path) -> None:
    path.rename(path.with_name("other.toml"))
    path.symlink_to("other.toml")
    _given(path)


DOUBTFUL: dict[str, tuple[Callable[[Path], object], str]] = {
    "their file": (_given, rf"skyward\.toml belongs to user {STRANGER}, not to user"),
    "their file in a folder like /tmp": (
        lambda path: (path.parent.chmod(0o1777), _given(path)),
        rf"skyward\.toml belongs to user {STRANGER}",
    ),
    "a file that all may write": (lambda path: path.chmod(0o646), r"skyward\.toml may be written to by everybody"),
    "a file that a group may write": (
        lambda path: (os.chown(path, 0, STRANGER), path.chmod(0o664)),
        rf"skyward\.toml may be written to by group {STRANGER} \(mode 0664\)",
    ),
    "their folder": (lambda path: _given(path.parent), rf"project belongs to user {STRANGER}, who could exchange"),
    "their folder above": (lambda path: _given(path.parents[1]), rf"belongs to user {STRANGER}, who could exchange"),
    "a folder that all may write": (
        lambda path: path.parent.chmod(0o777),
        r"project may be written to by everybody \(mode 0777\)",
    ),
    "their link": (_linked, rf"skyward\.toml is a symlink of user {STRANGER}"),
    "our link in their folder": (
        lambda path: (_linked(path), os.chown(path, 0, 0, follow_symlinks=False), _given(path.parent)),
        rf"project belongs to user {STRANGER}, who could exchange",
    ),
}


@as_root
@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_file_that_another_user_could_have_written_is_refused(project: Path, kind: str) -> None:
    """It was found by searching upwards. The error names file, owner and cure: a silence would drop `max_cost`."""
    path = project.parent / "skyward.toml"
    path.write_text("max_cost = 1\n")
    spoil, words = DOUBTFUL[kind]
    spoil(path)
    with pytest.raises(sky.BadRequest, match=words) as caught:
        sky.Settings.read({}, project)
    for cure in ("chown", "chmod go-w", f"SKYWARD_CONFIG={path}", "SKYWARD_CONFIG=/dev/null"):
        assert cure in str(caught.value)


@as_root
@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_file_that_the_user_names_is_read_whoever_owns_it(project: Path, kind: str) -> None:
    """SKYWARD_CONFIG is the user's own decision; no other file is looked at then."""
    path = project.parent / "skyward.toml"
    path.write_text("max_cost = 1\n")
    DOUBTFUL[kind][0](path)
    settings = sky.Settings.read({"SKYWARD_CONFIG": str(path)}, project)
    assert (settings.fields, settings.sources) == ({"max_cost": 1}, {"max_cost": str(path)})
    assert sky.Settings.read({"SKYWARD_CONFIG": "/dev/null"}, project).fields == {}


def _unsearchable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = Path.lstat

    def refused(self: Path) -> os.stat_result:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return lstat(self)

    monkeypatch.setattr(Path, "lstat", refused)  # root may look everywhere


NO_FILES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "FIFO": (lambda path, _: os.mkfifo(path), "it is a FIFO, no file"),
    "folder": (lambda path, _: path.mkdir(), "it is a folder, no file"),
    "device": (lambda path, _: path.symlink_to("/dev/zero"), "it is a device, no file"),
    "socket": (lambda path, _: os.mknod(path, 0o600 | stat.S_IFSOCK), "it is a socket, no file"),
    "link to nothing": (lambda path, _: path.symlink_to("gone.toml"), "No such file"),
    "link to itself": (lambda path, _: path.symlink_to("skyward.toml"), "[Ll]ink"),
    "folder above that may not be searched": (_unsearchable, "Permission denied"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_settings_that_are_no_file_are_refused_and_not_left_out(
    project: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """At once: a FIFO that nobody writes to would hang. They may hold `max_cost`."""
    path = project.parent / "skyward.toml"
    make, words = NO_FILES[kind]
    make(path, monkeypatch)
    with pytest.raises(sky.BadRequest, match=f"{path} cannot be read: .*{words}.*SKYWARD_CONFIG=/dev/null"):
        sky.Settings.read({}, project)
    if kind.startswith("folder above"):
        return
    with pytest.raises(sky.BadRequest, match=f"SKYWARD_CONFIG names {path}, which cannot be read: .*{words}"):
        sky.Settings.read({"SKYWARD_CONFIG": str(path)}, project)


def test_our_file_in_a_folder_like_tmp_is_read(project: Path) -> None:
    """The sticky bit keeps others from exchanging it."""
    project.parent.chmod(0o1777)
    (project.parent / "skyward.toml").write_text("nodes = 2\n")
    assert sky.Settings.read({}, project).fields == {"nodes": 2}


def test_a_named_file_that_is_not_there_is_an_error(project: Path) -> None:
    """The nearest file does not take its place."""
    (project / "skyward.toml").write_text("nodes = 2\n")
    with pytest.raises(sky.BadRequest, match=r"SKYWARD_CONFIG names none\.toml, which cannot be read: .*No such file"):
        sky.Settings.read({"SKYWARD_CONFIG": "none.toml"}, project)


def test_each_variable_of_ours_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """A program on a node has many of them, and none is called no setting. The list is that of the code."""
    folders = [ROOT / "skyward_core", ROOT / "integrations", ROOT / "stack"]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    names = {name for text in sources for name in re.findall(r"SKYWARD_[A-Z][A-Z_]*[A-Z]", text)}
    fields = {f"SKYWARD_{field.upper()}" for field in sky.PoolSpec.model_fields}
    assert len(names) > 30
    assert names - fields - NOT_SETTINGS == set()
    Settings.read(
        {name: "1" for name in [*NOT_SETTINGS, "SKYWARD_BOOT_0", "SKYWARD_MORE_TAGS_12"]}
        | {"SKYWARD_CONFIG": "", "SKYWARD_PROFILE": ""}
    )
    assert caplog.messages == []
    Settings.read({"SKYWARD_NODE": "2"})
    assert caplog.messages == ["SKYWARD_NODE in the environment is no setting; did you mean SKYWARD_NODES?"]
