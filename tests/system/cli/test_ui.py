"""The server of `skyward ui`: who may read it, and what each path answers."""

import json
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from prometheus_client import Metric as MetricFamily
from prometheus_client.parser import text_string_to_metric_families as families_from

from skyward_core.cli.ui import Utilisation
from skyward_core.errors import LedgerError
from skyward_core.live.observer import NodeUse
from tests.cli.ledger import ROOT, TOKEN, FakeUtilisation, Page, Skyward, record_pools, sample
from tests.page_blocks import pages_of
from tests.waiting import wait_until

PATHS = ["/api/pools", "/api/nodes", "/api/calls", "/api/cost", "/api/receipt?pool=sky-live", "/api/refusals"]


def test_without_its_token_no_path_answers(page: Page) -> None:
    """None at all is 401, a wrong one 403, also one that is not ASCII; the token may be a header or in the URL."""
    for path in ("/", "/nonesuch", *PATHS):
        assert page.get(path, token=None).status == 401
        assert page.get(path, token="wrong").status == 403
    assert page.get("/", token=None).headers["WWW-Authenticate"] == "Bearer"
    for wrong in (TOKEN + "x", TOKEN[:-1], "t\xf6ken"):
        assert page.get("/api/pools", token=wrong).status == 403
    assert page.get("/api/pools", token=None, Authorization=f"Basic {TOKEN}").status == 401
    assert page.get("/api/pools?token=wrong", token=None).status == 403
    assert page.get("/api/pools?token=", token=None).status == 401
    assert page.get(f"/api/pools?token={TOKEN}", token=None).status == 200


def test_a_browser_without_the_token_gets_a_page(page: Page) -> None:
    """It says where the token is. Programs, and the paths for programs, get JSON as before."""
    browser = "text/html,application/xhtml+xml,*/*;q=0.8"
    for token, status in ((None, 401), ("wrong", 403)):
        reply = page.get("/", token=token, Accept=browser)
        assert (reply.status, reply.headers["Content-Type"]) == (status, "text/html; charset=utf-8")
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert "The address with the token is what <code>skyward ui</code> printed" in reply.text
        assert "start <code>skyward ui</code> again" in reply.text
        assert TOKEN not in reply.text
        for path, accept in (("/", "*/*"), ("/api/pools", browser), ("/metrics", browser)):
            assert page.get(path, token=token, Accept=accept).json.keys() == {"error"}
    assert page.get("/", token=None, Accept=browser).headers["WWW-Authenticate"] == "Bearer"
    assert page.get("/<b>", Accept=browser).json == {"error": "there is no such page"}


def test_a_page_under_another_name_is_refused(page: Page) -> None:
    """Also with the token: a foreign host name that leads to 127.0.0.1 is DNS rebinding."""
    for host in ("127.0.0.1", "localhost:9999", "LOCALHOST"):
        assert page.get("/api/pools", Host=host).status == 200
    for host in (
        "evil.example",
        "127.0.0.1.evil.example:80",
        "localhost.evil.example",
        "evil@localhost",
        "[::1]:1",
        "",
    ):
        assert page.get("/api/pools", Host=host).status == 403


def test_it_listens_on_the_loopback_and_only_answers_get(page: Page) -> None:
    assert page.server.server_address[0] == "127.0.0.1"
    assert page.server.url == f"http://127.0.0.1:{page.server.server_port}/?token={TOKEN}"
    assert {page.get("/api/pools", method=method).status for method in ("POST", "PUT", "DELETE", "OPTIONS")} == {501}
    assert page.get("/nonesuch").status == 404
    assert page.get("http://evil.example/api/pools").status == 403


def test_the_page_is_one_file_that_loads_nothing_else(page: Page) -> None:
    """Its policy allows its own script and style, and requests to its own server; no answer is kept or framed."""
    reply = page.get("/")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", reply.text) == ["data:,"]
    assert set(re.findall(r"https?://[^\"' ]+", reply.text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", reply.text)
    policy = reply.headers["Content-Security-Policy"]
    nonces = set(re.findall(r"nonce[=-][\"']?([\w-]+)", reply.text + policy))
    assert len(nonces) == 1
    assert policy.startswith("default-src 'none'; ")
    assert nonces.isdisjoint(re.findall(r"nonce-([\w-]+)", page.get("/").headers["Content-Security-Policy"]))
    assert reply.headers["Cache-Control"] == "no-store"
    assert reply.headers["Referrer-Policy"] == "no-referrer"
    assert TOKEN not in reply.text


def test_the_data_are_those_of_the_commands(page: Page, skyward: Skyward) -> None:
    record_pools(skyward)
    pools = page.get("/api/pools").json
    fixed = ("pool", "name", "calls", "owner", "work", "open_resources", "usd_per_hour", "cost_usd")
    listed = skyward.json("ps --all")
    for shown, is_ended in ((pools["pools"], False), (pools["ended"], True)):
        expected = [[one[name] for name in fixed] for one in listed if (one["state"] == "ended") == is_ended]
        assert [[one[name] for name in fixed] for one in shown] == expected
    assert {one["pool"] for one in pools["ended"]} == {"sky-ended"}
    assert pools["warnings"] == []
    calls = page.get("/api/calls").json
    assert calls["calls"] == skyward.json("calls")["calls"][::-1]
    assert (calls["all"], {one["call"] for one in calls["calls"]}) == (4, {"c", "d", "e"})
    for by in ("day", "owner"):
        cost, expected = page.get(f"/api/cost?by={by}").json, skyward.json(f"cost --by {by}")
        assert (cost["rows"], cost["total"]) == (expected["rows"], expected["total"])
        assert cost["total"]["cost_usd"] > 0
    receipt = page.get("/api/receipt?pool=sky-live").json["receipt"]
    assert receipt == json.loads(skyward("receipt sky-live --json"))
    refusals = page.get("/api/refusals").json
    refused = [one for one in skyward.json("why sky-live") if one["error"]]
    assert refusals["refusals"] == [{"pool": "sky-live", **one} for one in refused]
    assert refused


def test_a_ledger_that_cannot_be_read_is_an_error_and_no_empty_list(page: Page, skyward: Skyward) -> None:
    record_pools(skyward)
    assert {page.get(path).status for path in PATHS} == {200}
    skyward.damage(
        *(f"ALTER TABLE skyward_{name} RENAME TO away_{name}" for name in ("pools", "resources", "attempts", "calls"))
    )
    for path in PATHS:
        reply = page.get(path)
        assert (path, reply.status, reply.json.keys()) == (path, 503, {"error"})
        assert "ledger" in reply.json["error"].lower()


def test_nodes_have_curves_or_the_reason_why_not(page: Page, utilisation: FakeUtilisation, skyward: Skyward) -> None:
    record_pools(skyward)
    samples = tuple(sample(percent, seconds, gpu=90.0) for percent, seconds in ((10, 100.0), (30, 102.0)))
    utilisation.uses = {"sky-live": [NodeUse(0, "i-0", samples, 1, 4)], "sky-dead": "no route to it"}
    found = {one["pool"]: one for one in page.get("/api/nodes").json["pools"]}
    assert found["sky-live"]["nodes"] == [
        {
            "node": 0,
            "instance": "i-0",
            "busy_slots": 1,
            "slots": 4,
            "seconds": 2.0,
            "cpu_percent": [10.0, 30.0],
            "memory_percent": [50.0, 50.0],
            "gpu_percent": [90.0, 90.0],
            "gpu_memory_percent": [25.0, 25.0],
        }
    ]
    assert (found["sky-dead"]["trouble"], found["sky-dead"]["is_awaited"]) == ("no route to it", False)
    assert (found["sky-gone"]["trouble"], found["sky-gone"]["is_awaited"]) == (None, True)
    assert "sky-ended" not in found


def families_of(page: Page) -> dict[str, MetricFamily]:
    """The metrics of the page by name, read with the parser of Prometheus' own library."""
    reply = page.get("/metrics")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = {one.name + ("_total" if one.type == "counter" else ""): one for one in families_from(reply.text)}
    assert {one.type for one in found.values()} == {"gauge", "counter"}
    assert all(one.documentation.endswith(".") for one in found.values())
    return found


def value_of(family: MetricFamily, **labels: str) -> float:
    (found,) = [one.value for one in family.samples if labels.items() <= one.labels.items()]
    return found


def test_metrics_are_those_of_the_ledger_and_of_the_nodes(
    page: Page, utilisation: FakeUtilisation, skyward: Skyward
) -> None:
    record_pools(skyward)
    uses = [NodeUse(rank, f"i-{rank}", (sample(50.0, gpu=25.0),), 1, 4) for rank in (0, 1)]
    utilisation.uses = {"sky-live": uses, "sky-dead": "no route to it"}
    found = families_of(page)
    listed = {one["pool"]: one for one in skyward.json("ps")}
    assert {one.labels["pool"] for one in found["skyward_pool_nodes"].samples} == listed.keys()
    assert sum(value_of(found["skyward_pools"], state=state) for state in ("live", "dead")) == len(listed)
    assert value_of(found["skyward_pool_nodes"], pool="sky-live", provider="folder", name="") == 2
    assert value_of(found["skyward_pool_cost_usd_per_hour"], pool="sky-live") == listed["sky-live"]["usd_per_hour"] == 4
    remaining = value_of(found["skyward_pool_lease_remaining_seconds"], pool="sky-live")
    assert remaining == pytest.approx(listed["sky-live"]["lease_seconds"], abs=60)
    assert value_of(found["skyward_pool_calls_in_flight"], pool="sky-live") == 2, "busy slots"
    assert value_of(found["skyward_pool_calls_in_flight"], name="nightly") == listed["sky-named"]["calls"]
    assert value_of(found["skyward_pool_slots"], pool="sky-live") == 8
    assert value_of(found["skyward_pool_slots_busy"], pool="sky-live") == 2
    reachable = {one.labels["pool"]: one.value for one in found["skyward_pool_reachable"].samples}
    assert reachable == {"sky-live": 1, "sky-dead": 0}
    assert value_of(found["skyward_node_cpu_ratio"], pool="sky-live", node="1") == 0.5
    assert value_of(found["skyward_node_gpu_ratio"], pool="sky-live", node="1") == 0.25
    dashboard = json.loads((ROOT / "docs/grafana/skyward.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert set(re.findall(r"skyward_\w+", " ".join(shown))) == found.keys()
    explained = re.findall(
        r"^\| `(skyward_\w+)` \|", "\n".join((ROOT / page).read_text() for page in pages_of("commands")), re.MULTILINE
    )
    assert sorted(explained) == sorted(found)
    owners = {row["key"]: row["cost_usd"] for row in skyward.json("cost --by owner")["rows"]}
    assert {one.labels["owner"]: one.value for one in found["skyward_cost_usd_total"].samples} == owners
    assert value_of(found["skyward_refusals_total"], provider="folder", error="NoCapacity") == 1
    assert value_of(found["skyward_ledger_unreadable_rows"]) == 0


def test_metrics_need_the_library_of_prometheus(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `prometheus` has it."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    reply = page.get("/metrics")
    assert (reply.status, reply.json["error"]) == (
        400,
        "/metrics needs the package prometheus-client: pip install 'skyward-core[prometheus]'",
    )


def test_a_row_that_cannot_be_read_is_named_and_the_others_are_shown(page: Page, skyward: Skyward) -> None:
    record_pools(skyward)
    skyward.damage("UPDATE skyward_pools SET created_microseconds = 'soon' WHERE id = 'sky-dead'")
    pools = page.get("/api/pools").json
    assert {"sky-live", "sky-named"} <= {one["pool"] for one in pools["pools"]}
    assert [line for line in pools["warnings"] if "sky-dead" in line]


def test_utilisation_follows_open_pools_and_tells_when_the_ledger_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, pools, trouble = list[list[str]](), ["sky-1", "sky-2"], list[LedgerError]()

    def listed(**_: object) -> list[SimpleNamespace]:
        if trouble:
            raise trouble[0]
        return [SimpleNamespace(id=pool_id) for pool_id in pools]

    def seen(pool_id: str) -> object:
        try:
            return utilisation.of(pool_id)
        except LedgerError as error:
            return str(error)

    uses = SimpleNamespace(keep=lambda ids: kept.append([*ids]), of=lambda pool_id: f"{pool_id} is far away")
    monkeypatch.setattr("skyward_core.cli.ui.PoolUses", lambda *_, **__: nullcontext(uses))
    with Utilisation(SimpleNamespace(pools=listed)) as utilisation:  # type: ignore[arg-type]
        wait_until(lambda: seen("sky-2") == "sky-2 is far away", "the first look")
        pools.remove("sky-2")
        wait_until(lambda: seen("sky-2") is None, "an end")
        trouble.append(LedgerError("the disk is gone"))
        wait_until(lambda: seen("sky-1") == "the disk is gone", "a ledger that is away")
        trouble.clear()
        wait_until(lambda: seen("sky-1") == "sky-1 is far away", "a ledger that is back")
    assert (kept[0], kept[-1]) == (["sky-1", "sky-2"], ["sky-1"])
