"""Wrong input: the `skyward` command reports the fault, and shows no traceback."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from skyward_core import cli


@given(
    st.one_of(
        st.text(max_size=30),
        st.text(max_size=10).map(lambda name: f"sqlite:///{name}"),
        st.text(max_size=10).map(lambda name: f"postgresql+psycopg://localhost:{name}"),
    )
)
@example("postgresql+psycopg://localhost:port")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_url_of_a_ledger_is_a_traceback(tmp_path: Path, where: str) -> None:
    """It is opened, or refused with a message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        try:
            assert cli.main([f"--ledger={where}", "ps"]) in (0, 1)
        except SystemExit as end:
            assert end.code in (0, 2)
