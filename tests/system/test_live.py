"""The check against a real cloud, run against a fake one: it reads, and makes no request that costs."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.providers.fake_digitalocean import TEAM, TOKEN, FakeDigitalOcean


def live(fake: FakeDigitalOcean, token: str) -> subprocess.CompletedProcess[str]:
    variables = {"DIGITALOCEAN_TOKEN": token, "DIGITALOCEAN_API_URL": fake.url}
    return subprocess.run(
        [sys.executable, "-m", "tests.live", "digitalocean"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_reads_and_spends_nothing() -> None:
    with FakeDigitalOcean() as fake:
        done = live(fake, TOKEN)
        assert done.returncode == 0, done.stderr
        assert TEAM in done.stdout
        assert "with H100: from $4.4100 an hour (digitalocean/nyc1 gpu-h100x1-80gb)" in done.stdout
        assert "machines   0 of ours" in done.stdout
        assert {request.method for request in fake.requests} == {"GET"}
        assert TOKEN not in done.stdout


def test_refused_credentials_are_one_line() -> None:
    with FakeDigitalOcean() as fake:
        done = live(fake, "dop_v1_wrong")
    assert done.returncode == 1
    assert done.stderr.startswith("CredentialsError: ")
    assert "Traceback" not in done.stderr
    assert "dop_v1_wrong" not in done.stderr
