"""The sweeps of dags/ and flows/, each run by its orchestrator: a machine with a dead owner ends, a dry run ends
nothing, and a failure fails the run.
"""

import os
import textwrap
from pathlib import Path

import pytest

import skyward_core as sky
from tests.system.integrations.test_sweeps import (  # noqa: F401 - fixtures
    ONE_AND_LONG,
    ORCHESTRATORS,
    environ,
    forgotten,
    run,
    server,
)

FAILURE = "some machines could not be listed or ended; the next sweep tries again"


BLIND = """
import skyward_core as sky

def blind(provider, pool_id=None):
    raise ConnectionError("503 from the listing")

sky.Local.instances = blind
"""
"""Simulates a provider that does not answer; imported by every Python process that has it on its path."""


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("orchestrator", ONE_AND_LONG)
def test_a_sweep_fails_if_a_provider_does_not_answer(
    orchestrator: str, environ: dict[str, str], forgotten: sky.Instance, tmp_path: Path
) -> None:
    """When a provider of the settings does not answer, the run fails with its error, and none of its machines was
    ended.

    The sweep asks all providers of the settings.
    """
    environ = {name: value for name, value in environ.items() if not name.startswith("DIGITALOCEAN")}
    environ |= {"SKYWARD_PROVIDER": '["local", "digitalocean"]', "XDG_CONFIG_HOME": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(BLIND))
    code, said = run(
        ORCHESTRATORS[orchestrator],
        environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert FAILURE in said
    assert "503 from the listing" in said
    assert "DIGITALOCEAN_TOKEN" in said  # there is no token
    assert code != 0 or orchestrator == "airflow", said  # `airflow dags test` reports the state only as text
    assert "state=failed" in said or "DagRunState.FAILED" in said or orchestrator != "airflow", said
    assert sky.Local().instances(forgotten.pool_id) == [forgotten]
