"""The commands of the Dockerfile's stage `packages`, without a container engine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from tests.stack.compose import OURS, ROOT, read, read_env, services

pytestmark = [pytest.mark.timeout(600)]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_image_has_the_programs_of_its_services_and_our_version(tmp_path: Path) -> None:
    """Without git, and with nothing but the files that the stage copies. The cache of uv is used, so that nothing is
    downloaded twice.
    """
    (stage,) = re.findall(r"^FROM base AS packages\n(.*?)^FROM", DOCKERFILE, re.DOTALL | re.MULTILINE)
    (version,) = re.findall(r"^ARG VERSION=(\S+)", stage, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    environment |= {"UV_PYTHON": os.path.realpath(sys.executable), "UV_PYTHON_DOWNLOADS": "never", "VERSION": version}
    environment |= {"PATH": f"{Path(uv.find_uv_bin()).parent}:{os.environ['PATH']}", "UV_COMPILE_BYTECODE": "0"}
    for instruction, arguments in re.findall(r"^(COPY|RUN) (.*)", stage, re.MULTILINE):
        if instruction == "COPY":
            *sources, _ = arguments.split()
            for source in map(ROOT.joinpath, sources):
                shutil.copytree(source, tmp_path / source.name) if source.is_dir() else shutil.copy(source, tmp_path)
        elif "uv sync" in arguments:
            command = arguments.replace("--no-cache", "")
            done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    programs = tmp_path / ".venv/bin"
    shown = subprocess.run([programs / "skyward", "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == f"skyward {version}"
    ours = [name for name, body in read()["services"].items() if OURS.fullmatch(body["image"])]
    wanted = {services(read(), read_env())[name].command[0] for name in ours}
    assert wanted >= {"python", "prefect", "airflow", "dagster", "dagster-webserver", "dagster-daemon"}
    assert [name for name in wanted if not (programs / name).exists()] == []
    drivers = "import asyncpg, boto3, dagster_postgres, psycopg, psycopg2"
    subprocess.run([programs / "python", "-c", drivers], check=True)
