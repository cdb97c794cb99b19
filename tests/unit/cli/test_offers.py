"""`skyward offers` and `skyward why`: what is sold, and why a pool did not get it."""

import json
from pathlib import Path

import pytest

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Attempt
from skyward_core.machines.offers import Offer
from tests.cleanup.pools import FolderProvider
from tests.unit.cli.test_commands import HERE, Clock, Skyward, clock, folder, ledger, lines, open_pool, skyward, url  # noqa: F401 - fixtures


def test_why_lists_every_attempt(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """They are in order, with the provider's own messages. A pool without attempts is reported, an unknown one is an
    error.
    """
    open_pool(ledger, clock, folder, "sky-1", owner=HERE)
    assert "sky-1 has not tried" in skyward("why sky-1")
    refused = Attempt(
        "sky-1",
        clock.now,
        "aws",
        "us-east-1",
        "p5.48xlarge",
        is_spot=True,
        seconds=2.13,
        error="NoCapacity",
        code="Insufficient",
        message="none\nat all",
    )
    rented = Attempt("sky-1", clock.now, "runpod", "any", "H100 x8", is_spot=False, seconds=9.0)
    ledger.note_attempts([refused, rented])
    head, first, second = lines(skyward("why sky-1"))
    assert head == ["AT", "PROVIDER", "REGION", "TYPE", "MARKET", "SECONDS", "OUTCOME", "CODE", "REASON"]
    assert first[1:] == ["aws", "us-east-1", "p5.48xlarge", "spot", "2.1", "NoCapacity", "Insufficient", "none at all"]
    assert second[1:] == ["runpod", "any", "H100 x8", "on demand", "9.0", "rented"]
    output = json.loads(skyward("why sky-1 --json"))
    assert [(one["error"], one["code"], one["seconds"]) for one in output] == [
        ("NoCapacity", "Insufficient", 2.13),
        (None, None, 9.0),
    ]
    assert "sky-nowhere" in skyward("why sky-nowhere", code=1)


def test_offers_are_listed_with_their_age(skyward: Skyward, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cheapest is first. A search without offers fails, and the error has the reason."""
    sold = [
        Offer(
            provider="folder",
            instance_type=f"t{n}",
            region="here",
            price_per_hour=float(n),
            vcpus=n,
            memory_gb=8,
            accelerator="L4",
            accelerators=1,
            accelerator_memory_gb=24,
        )
        for n in (3, 1, 2)
    ]
    monkeypatch.setattr(FolderProvider, "offers", lambda self, want: sold)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    head, *offers, age = lines(skyward("offers --accelerator L4 --max-price 2.5"))
    assert head[:5] == ["PROVIDER", "REGION", "TYPE", "MARKET", "USD/H"]
    assert [(offer[2], offer[3], offer[4], offer[7]) for offer in offers] == [
        ("t1", "on demand", "1.0000", "1 x L4 24GB"),
        ("t2", "on demand", "2.0000", "1 x L4 24GB"),
    ]
    assert age[0].startswith("2 in all; queried ")
    output = json.loads(skyward("offers --json --limit 1"))
    assert output["age_seconds"] < 300
    assert [offer["instance_type"] for offer in output["offers"]] == ["t1"]
    assert "the cheapest 1 of 3" in skyward("offers --limit 1")
    assert "does not report its architecture" in skyward("offers --architecture arm64", code=1)
    assert "has 1 of them" in skyward("offers --accelerator L4 --count 8", code=1)


def test_a_price_below_a_hundredth_of_a_cent_is_not_zero(
    skyward: Skyward,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ledger: Ledger,
    clock: Clock,
    folder: FolderProvider,
) -> None:
    """No price above zero is shown as 0.0000; JSON has the exact number."""
    cheap = Offer(
        provider="folder", instance_type="t", region="here", price_per_hour=0.00001234567, vcpus=1, memory_gb=8
    )
    monkeypatch.setattr(FolderProvider, "offers", lambda self, want: [cheap])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert lines(skyward("offers"))[1][4] == "0.00001235"
    assert json.loads(skyward("offers --json"))["offers"][0]["price_per_hour"] == 0.00001234567
    assert "costs $0.00001235 an hour" in skyward("offers --max-price 0.000001", code=1)
    open_pool(ledger, clock, folder, "sky-short", owner=HERE, age_seconds=0.5)  # a begun second is billed in full
    assert lines(skyward("ps"))[1][-2:] == ["2.00", "0.000556"]
    assert lines(skyward("cost"))[-1][-3:] == ["0.000556", "0.002223", "0.001667"]
