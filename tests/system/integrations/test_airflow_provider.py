"""The Airflow provider as a package: its info, its classifiers, and where it uses names that Airflow may move."""

import subprocess
import sys


def test_the_info_imports_nothing_of_airflow() -> None:
    """Each process of Airflow asks for it."""
    code = "import sys, airflow_provider_skyward as ours; ours.get_provider_info(); print('airflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
