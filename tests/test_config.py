"""Settings: the environment has priority over the file, the nearest file is used, and the log names the source."""

import logging
from pathlib import Path

import pytest

import skyward_core as sky


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "project" / "flows"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_nothing_set_means_this_machine(project: Path) -> None:
    """Without settings a pool that names no provider runs on Local."""
    assert sky.Settings.read({}, project) == sky.Settings()
    assert "local" in repr(sky.ComputePool(display="quiet"))


def test_the_environment_names_fields(project: Path) -> None:
    """SKYWARD_* are read as JSON if they are JSON, else as text; other variables are ignored."""
    environ = {
        "SKYWARD_PROVIDER": '{"name": "local", "price_per_hour": 2}',
        "SKYWARD_NODES": "3",
        "SKYWARD_ACCELERATOR": "A100",
        "SKYWARD_COLLECT_METRICS": "false",
        "NODES": "9",
        "PATH": "/bin",
    }
    settings = sky.Settings.read(environ, project)
    assert settings.fields == {
        "provider": {"name": "local", "price_per_hour": 2},
        "nodes": 3,
        "accelerator": "A100",
        "collect_metrics": False,
    }
    assert "SKYWARD_NODES" in settings.sources["nodes"]


def test_the_nearest_file_is_read(project: Path) -> None:
    """skyward.toml is searched from the working directory upwards; only the nearest is read."""
    (project.parent / "skyward.toml").write_text('nodes = 2\n[provider]\nname = "local"\nprice_per_hour = 1.2\n')
    assert sky.Settings.read({}, project).fields == {"nodes": 2, "provider": {"name": "local", "price_per_hour": 1.2}}
    (project / "skyward.toml").write_text("nodes = 5\n")
    settings = sky.Settings.read({}, project)
    assert settings.fields == {"nodes": 5}
    assert settings.sources["nodes"] == str(project / "skyward.toml")


def test_the_users_own_file_is_read_if_no_other_exists(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no file in the working directory or above it, the one in the user's configuration directory is read."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "skyward").mkdir(parents=True)
    (tmp_path / "config" / "skyward" / "skyward.toml").write_text("nodes = 7\n")
    assert sky.Settings.read({}, project).fields == {"nodes": 7}


def test_keywords_win_over_the_environment_and_that_over_the_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keyword over environment over file."""
    (project / "skyward.toml").write_text(
        'nodes = 2\nconcurrency = 3\n[provider]\nname = "local"\nprice_per_hour = 1.2\n'
    )
    monkeypatch.setenv("SKYWARD_NODES", "4")
    spec = sky.ComputePool(display="quiet", concurrency=1).spec
    assert (spec.nodes, spec.concurrency, spec.provider) == (4, 1, sky.Local(price_per_hour=1.2))
    assert sky.ComputePool(provider=sky.Local(), nodes=1).spec.nodes == 1
    assert sky.ComputePool(provider=sky.Local()).spec.provider == sky.Local()


def test_provider_none_means_not_given(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`provider=None` is filled from the settings, like a provider that is not given."""
    monkeypatch.setenv("SKYWARD_PROVIDER", '{"name": "local", "price_per_hour": 3}')
    assert sky.ComputePool(provider=None).spec.provider == sky.Local(price_per_hour=3)


def test_an_unknown_setting_is_refused_with_the_nearest_name(project: Path) -> None:
    """A misspelt name in a file is BadRequest, with the file and the nearest name."""
    (project / "skyward.toml").write_text("node = 2\n")
    with pytest.raises(sky.BadRequest, match=r"skyward\.toml.*'node'.*'nodes'"):
        sky.Settings.read({}, project)


def test_a_file_that_is_no_toml_is_refused(project: Path) -> None:
    """A syntax error is BadRequest with the file and the line."""
    (project / "skyward.toml").write_text("nodes = \n")
    with pytest.raises(sky.BadRequest, match=r"skyward\.toml.*line 1"):
        sky.Settings.read({}, project)


def test_a_wrong_value_in_the_settings_says_where_it_was_found(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad value from the environment is BadRequest that names the variable, so that the user knows what to change."""
    monkeypatch.setenv("SKYWARD_NODES", "many")
    with pytest.raises(sky.BadRequest, match="SKYWARD_NODES"):
        sky.ComputePool(provider=sky.Local())


def test_a_misspelt_variable_is_reported(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SKYWARD_NODE=2 is refused, or logged with the nearest name."""
    monkeypatch.setenv("SKYWARD_NODE", "2")
    with caplog.at_level(logging.WARNING, logger="skyward"):
        try:
            sky.ComputePool(provider=sky.Local())
        except sky.BadRequest as error:
            assert "SKYWARD_NODES" in str(error)
            return
    assert any("SKYWARD_NODES" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_the_log_names_the_provider_and_its_source(
    project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the program names no provider, the log of the opening pool names it and where it was found."""
    caplog.set_level("INFO", "skyward")
    with sky.ComputePool(display="quiet"):
        assert "running on this machine (Local)" in caplog.text
    (project / "skyward.toml").write_text('provider = "local"\n')
    with sky.ComputePool(display="quiet"):
        assert f"provider 'local', from {project / 'skyward.toml'}" in caplog.text
    monkeypatch.setenv("SKYWARD_PROVIDER", '{"name": "local", "price_per_hour": 2.0}')
    with sky.ComputePool(display="quiet") as pool:
        assert "provider 'local', from SKYWARD_PROVIDER in the environment" in caplog.text
        assert pool.spec.provider == sky.Local(price_per_hour=2.0)
