"""The client of REST APIs against real servers: TLS, refused and reset connections, timeouts, and whole clouds."""

import json
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import skyward_core as sky
from skyward_core.engine.certificates import make_certificate
from skyward_core.errors import BadRequest, NoCapacity, ProviderFailed
from skyward_core.providers import _http
from skyward_core.providers._http import Api
from tests.providers.contract import POOL, STARTUP, cheapest, tags
from tests.providers.fake_runpod import KEY as RUNPOD_KEY
from tests.providers.fake_runpod import NO_CAPACITY, FakeRunPod, gpu, problem
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, FakeVerda
from tests.providers.in_process import Clock, clock  # noqa: F401 - a fixture
from tests.unit.providers.test_http import FakeThings, refused


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_refused_connection_is_tried_again(clock: Clock, method: str) -> None:
    """No process listened, so the request had no effect."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Api("Acme", url) as api:
        error = refused(api, method)
    assert type(error) is ProviderFailed
    assert "Connection refused" in str(error)
    assert isinstance(error.__cause__, httpx.ConnectError)
    assert clock.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert sum(clock.pauses) <= _http.PATIENCE_SECONDS


def test_the_variable_for_certificates_may_change_between_clients(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The certificates are loaded once for each value of SSL_CERT_FILE, not once for each process."""
    pem, made = tmp_path / "server.pem", make_certificate("a pool")
    pem.write_text(made.certificate + made.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with FakeThings(tls=server) as cloud:
        with Api("Acme", cloud.url) as api:
            assert "self-signed certificate" in str(refused(api))
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        with Api("Acme", cloud.url) as api:
            assert "IP address mismatch" in str(refused(api))  # trusted, but made for another name
    monkeypatch.setenv("SSL_CERT_FILE", f"{pem}.old")
    with pytest.raises(BadRequest, match=r"certificates of SSL_CERT_FILE=.*server.pem.old cannot be read"):
        Api("Acme", cloud.url)


@pytest.mark.parametrize(("method", "tries"), [("GET", 2), ("POST", 1)])
def test_a_reset_connection_is_a_failure(clock: Clock, method: str, tries: int) -> None:
    """Only a read is repeated."""
    with FakeThings() as cloud, Api("Acme", cloud.url) as api:
        cloud.fail(method, "/things")
        if method == "GET":
            api.request(method, "/things")
        else:
            assert isinstance(refused(api, method).__cause__, httpx.ReadError | httpx.RemoteProtocolError)
    assert len(cloud.asked(method)) == tries


LATE = """\
import atexit, json, sys
from skyward_core.providers.base import load
provider = load(json.loads(sys.argv[1]))
atexit.register(lambda: print(len(provider.instances(sys.argv[2])), provider.terminate(sys.argv[3:])))
"""


def test_another_process_terminates_machines_while_it_ends(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `atexit` callback tears down an open pool. Executors of concurrent.futures accept no work then."""
    monkeypatch.setenv("VERDA_CLIENT_ID", CLIENT_ID)
    monkeypatch.setenv("VERDA_CLIENT_SECRET", CLIENT_SECRET)
    with FakeVerda() as cloud:
        provider = sky.Verda(endpoint_url=f"{cloud.url}/v1")
        mine = [instance.id for instance in provider.launch(cheapest(provider), 3, tags(), STARTUP)]
        fields = json.dumps(provider.to_json())
        done = subprocess.run(
            [sys.executable, "-c", LATE, fields, POOL, *mine], capture_output=True, text=True, check=False
        )
        assert done.stdout == "3 None\n", done.stderr
        assert cloud.alive() == set()


@pytest.mark.parametrize(("places", "detail", "kind", "calls"), [
    (9, "registry 'nope' does not exist", BadRequest, 3),
    (2, "registry 'nope' does not exist", BadRequest, 2),
    (9, NO_CAPACITY, NoCapacity, 9),
])  # fmt: skip
def test_an_invalid_request_is_not_tried_for_every_candidate(
    places: int, detail: str, kind: type[Exception], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same refusal of three candidates with stock, or of all, proves an invalid request."""
    with FakeRunPod() as fake:
        monkeypatch.setenv("RUNPOD_API_BASE_URL", fake.url)
        monkeypatch.setenv("RUNPOD_API_KEY", RUNPOD_KEY)
        fake.sell(gpu("NVIDIA GeForce RTX 4090", 24, 0.69, None, " ".join(f"EU-{place}" for place in range(places))))
        fake.fail("POST", "/v2/pods", problem(400, detail), times=1000)
        with pytest.raises(kind) as caught:
            sky.ComputePool(provider=sky.RunPod(registry="nope"), accelerator="RTX 4090", display="quiet").open()
        assert type(caught.value) is kind
        assert detail in str(caught.value)
        assert len(fake.asked("POST", "/v2/pods")) == calls
