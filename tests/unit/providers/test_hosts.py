"""`Hosts`: as a value, and on the machines of the test bed, with real guards that tests kill."""

import contextlib
import json
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.providers import base, host_connections, hosts

ANY = sky.Requirements()
POOL = "sky-test-hosts"


class FakeHosts:
    """Hosts without a network: `keys` are the keys that they show, `gpus` what their driver lists."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[str, str | None] = {}
        self.gpus: list[str] = []
        self.endpoints: dict[str, sky.Endpoint] = {}
        """Where the last connections went, by address."""
        self.asked: list[tuple[str, dict[str, Sequence[str]]]] = []
        """The scripts that ran, and their arguments by address."""
        monkeypatch.setattr(hosts, "HostConnections", partial(FakeConnections, self))


class FakeConnections(contextlib.nullcontext[Any]):
    """The connections of one request to fake hosts."""

    def __init__(self, fakes: FakeHosts, endpoints: dict[str, sky.Endpoint], keys: host_connections.SeenKeys) -> None:
        super().__init__(self)
        self._fakes, self._keys = fakes, keys
        fakes.endpoints = endpoints

    def connect(self, straggler_seconds: float | None = None) -> dict[str, sky.SkywardError]:
        failures: dict[str, sky.SkywardError] = {}
        for address in self._fakes.endpoints:
            try:
                self._keys.note(address, self._fakes.keys.get(address))
            except sky.HostKeyChanged as error:
                failures[address] = error
        return failures

    def ask(
        self, script: str, arguments: dict[str, Sequence[str]], **_: object
    ) -> tuple[dict[str, host_connections.HostAnswer], dict[str, sky.SkywardError]]:
        self._fakes.asked.append((script, dict(arguments)))
        values = {
            "vcpus": ["4"],
            "memory_kib": ["1000000"],
            "machine": ["x86_64"],
            "ip": ["10.0.0.1"],
            "directory": [""],
        }
        answer = host_connections.HostAnswer({**values, "gpu": self._fakes.gpus})
        return dict.fromkeys(arguments, answer), {}

    def endpoint(self, address: str) -> sky.Endpoint:
        return self._fakes.endpoints[address]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    return FakeHosts(monkeypatch)


def test_the_provider_survives_json() -> None:
    """The fields come back equal; copies and the text contain no more than them."""
    provider = sky.Hosts("10.0.0.5", "ubuntu@gpu-box:2222", key="~/.ssh/id", price_per_hour=1.5)
    fields = provider.to_json()
    assert fields == {
        "name": "hosts",
        "addresses": ["10.0.0.5", "ubuntu@gpu-box:2222"],
        "key": "~/.ssh/id",
        "price_per_hour": 1.5,
    }
    assert base.load(json.loads(json.dumps(fields))) == provider
    assert sky.Hosts(addresses=["10.0.0.5"]) == sky.Hosts("10.0.0.5") != sky.Hosts("10.0.0.6")
    assert provider.model_copy() == provider
    with pytest.raises(ValueError, match="frozen"):
        provider.key = "other"
    pools = provider.for_pool()
    assert pools == provider
    assert (hash(pools), pools.to_json()) == (hash(provider), fields)


def test_a_pools_own_copy_remembers_host_keys(fakes: FakeHosts) -> None:
    """Each copy has its own keys, one for each address. A provider outside a pool remembers none."""

    def pinned(hosts: sky.Hosts) -> list[str | None]:
        hosts.instances()
        return [fakes.endpoints[address].host_key for address in ("gpu-1", "gpu-2")]

    provider = sky.Hosts("gpu-1", "gpu-2")
    one, other = provider.for_pool(), provider.for_pool()
    fakes.keys = {"gpu-1": "key a", "gpu-2": None}
    assert [pinned(it) for it in (one, one, provider, provider)] == [
        [None, None],
        ["key a", None],
        [None, None],
        [None, None],
    ]
    fakes.keys = {"gpu-1": "key b"}
    with pytest.raises(sky.HostKeyChanged, match="two host keys: key a and key b"):
        one.instances()
    assert [pinned(it) for it in (provider, other, other)] == [[None, None], [None, None], ["key b", None]]
    fakes.keys = {}
    assert pinned(pickle.loads(pickle.dumps(one))) == ["key a", None]


@pytest.mark.parametrize(
    ("address", "fields", "endpoint"),
    [
        ("10.0.0.5", {}, {"host": "10.0.0.5"}),
        (
            "gpu-box",
            {"user": "me", "port": 2200, "key": "k", "known_hosts": "h", "config": "c"},
            {"host": "gpu-box", "user": "me", "port": 2200, "key": "k", "known_hosts": "h", "config": "c"},
        ),
        ("you@gpu-box:22", {"user": "me", "port": 2200}, {"host": "gpu-box", "user": "you", "port": 22}),
        ("me@corp.example@gpu-box", {}, {"host": "gpu-box", "user": "me@corp.example"}),
        ("[fd00::5]", {}, {"host": "fd00::5"}),
        ("root@[fe80::1%eth0]:2222", {}, {"host": "fe80::1%eth0", "user": "root", "port": 2222}),
    ],
)
def test_an_address_sets_host_user_and_port(fakes: FakeHosts, address: str, fields: dict, endpoint: dict) -> None:
    """User and port of an address have precedence over the provider's, and both over ~/.ssh/config."""
    sky.Hosts(address, **fields).instances()
    assert fakes.endpoints == {address: sky.Endpoint(**endpoint)}


@pytest.mark.parametrize(
    ("addresses", "fields"),
    [
        ((), {}),
        (("a", "b", "a"), {}),
        (("gpu-box", "you@GPU-box"), {}),
        (("gpu-box", "gpu-box:2222"), {"port": 2222}),
        (("gpu-box:65536",), {}),
        (("fd00::5",), {}),
        (("",), {}),
        (("gpu box",), {}),
        (("gpu-box",), {"port": 0}),
        (("gpu-box",), {"price_per_hour": -1}),
        (("gpu-box",), {"adresses": ["b"]}),
    ],
)
def test_invalid_fields_are_refused(addresses: tuple[str, ...], fields: dict) -> None:
    """No host, a host named twice, and an invalid address, port or price raise ValueError at once."""
    with pytest.raises(ValueError):
        sky.Hosts(*addresses, **fields)


def test_two_ports_of_one_address_are_two_hosts() -> None:
    """Ports distinguish machines behind one address."""
    assert len(sky.Hosts("gate:2201", "gate:2202").addresses) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: sky.Hosts("root:hunter2@gpu-box"),
        lambda: sky.Hosts("gpu-box", key="-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2"),
    ],
)
def test_a_secret_in_the_wrong_field_is_not_repeated(make: Callable[[], object]) -> None:
    """A password in an address, or a key in place of its path, is refused without repeating it."""
    with pytest.raises(ValueError) as caught:
        make()
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


def test_an_id_determines_its_possible_hosts(fakes: FakeHosts) -> None:
    """An id with a host's mark is looked for only there; one with an unknown mark, on all hosts."""

    def launched(provider: sky.Hosts) -> str:
        (offer,) = provider.offers(ANY)
        tags = {base.POOL_TAG: POOL, base.RANK_TAG: "0"}
        (instance,) = provider.launch(offer, 1, tags, "true")
        return instance.id

    of_a, of_b, of_another = (launched(sky.Hosts(address, user="you")) for address in ("a", "b", "c"))
    sky.Hosts("a", "b").terminate([of_a, of_b, of_another])
    script, arguments = fakes.asked[-1]
    assert script == hosts.END
    assert {address: set(its[1:]) for address, its in arguments.items()} == {
        "a": {of_a, of_another},
        "b": {of_b, of_another},
    }


def test_only_hosts_without_a_price_may_be_left_to_their_lease() -> None:
    """A host with a price is billed until it is confirmed gone, and so is every machine of a cloud."""
    assert sky.Hosts("10.0.0.1").may_be_left_to_its_lease()
    assert not sky.Hosts("10.0.0.1", price_per_hour=1.5).may_be_left_to_its_lease()
    assert not any(
        kind().may_be_left_to_its_lease() for kind in (sky.AWS, sky.DigitalOcean, sky.Verda, sky.VastAI, sky.RunPod)
    )


def test_foreign_ids_cause_no_connection() -> None:
    """Ids of another shape, prefixes of ids, and paths are ignored."""
    sky.Hosts("host.invalid").terminate(
        ["local-000000000000", "host-00000000000", "host-", "", ".", "host-/../../../../x", "i-0123456789abcdef0"]
    )


def test_the_drivers_output_becomes_accelerators(fakes: FakeHosts) -> None:
    """Names become the catalogue's, MiB become GB. A second kind of GPU does not count. Memory or name may be unknown."""

    def host(*gpus: str) -> sky.Offer:
        fakes.gpus = list(gpus)
        (offer,) = sky.Hosts("gpu-1").offers(ANY)
        return offer

    four = host(*["NVIDIA A100-SXM4-80GB, 81920"] * 4)
    assert (four.accelerator, four.accelerators, four.accelerator_memory_gb) == ("A100", 4, 81920 * 1024**2 / 1e9)
    assert four.memory_gb == 1.024
    mixed = host("Tesla T4, 15360", "NVIDIA A100-SXM4-80GB, 81920")
    assert (mixed.accelerator, mixed.accelerators) == ("T4", 1)
    shared = host("NVIDIA GB10, [N/A]")
    assert (shared.accelerators, shared.accelerator_memory_gb) == (1, None)
    assert host("Quadro Nobody Knows, 1000").accelerator == "Quadro Nobody Knows"
    assert (host().accelerator, host().accelerators) == (None, 0)
