"""The processor of machines: in every offer, chosen by `architecture`, any by default."""

import platform
import tomllib
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.image.image import runtime_pins
from skyward_core.machines.offers import Offer, Requirements, matches, rank, select_instance
from skyward_core.providers.host_connections import HostAnswer
from skyward_core.providers.hosts import _Host
from skyward_core.providers.vastai.market import merge, to_market_offer
from skyward_core.provisioning.candidates import ProviderOffers, candidates
from tests.providers.fake_vastai import ask

HERE = {"x86_64": "x86_64", "aarch64": "arm64"}[platform.machine()]
OTHER = "arm64" if HERE == "x86_64" else "x86_64"


def machine(kind: str, price: float, **fields: Any) -> Offer:
    return Offer(
        **{
            "provider": "local",
            "instance_type": kind,
            "region": "r-1",
            "price_per_hour": price,
            "vcpus": 2,
            "memory_gb": 4,
            **fields,
        }
    )


T4G, T3, UNREPORTED = (
    machine("t4g.small", 0.0168, architecture="arm64"),
    machine("t3.small", 0.0208, architecture="x86_64"),
    machine("elsewhere", 0.01),
)


def test_any_processor_matches_unless_one_is_required() -> None:
    """The cheapest machine is chosen.

    With `architecture` it is the cheapest of that kind. Unknown architectures do not match.
    """
    assert [offer.instance_type for offer in rank([T3, T4G, UNREPORTED], Requirements())] == [
        "elsewhere",
        "t4g.small",
        "t3.small",
    ]
    assert [offer.instance_type for offer in rank([T3, T4G, UNREPORTED], Requirements(architecture="x86_64"))] == [
        "t3.small"
    ]
    assert select_instance([T3, T4G], architecture="arm64") == T4G
    assert matches(UNREPORTED, Requirements(architecture="arm64")) == "does not report its architecture"
    with pytest.raises(sky.NoCapacity, match=r"no provider offers x86_64: .* is arm64"):
        rank([T4G], Requirements(architecture="x86_64"))


@pytest.mark.parametrize(
    ("requested", "kept"),
    [("arm64", "arm64"), ("aarch64", "arm64"), ("amd64", "x86_64"), ("x86_64", "x86_64"), (None, None)],
)
def test_a_pool_accepts_all_names_of_an_architecture(requested: str | None, kept: str | None) -> None:
    """It is in the spec and its requirements, also after JSON, and decides which machines are candidates."""
    spec = sky.PoolSpec.of(architecture=requested) if requested else sky.PoolSpec()
    assert sky.PoolSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.requirements.architecture == kept
    found, _ = candidates(spec, [ProviderOffers(sky.Local(), (T3, T4G))])
    assert found[0].parts[0].offer == (T3 if kept == "x86_64" else T4G)
    assert {part.offer.architecture for one in found for part in one.parts} == ({kept} if kept else {"x86_64", "arm64"})


def test_offers_can_be_selected_by_architecture() -> None:
    """This machine is offered only with its own architecture."""
    assert list(sky.offers("local", architecture=OTHER, max_age_seconds=0)) == []
    assert sky.offers("local", architecture=HERE, max_age_seconds=0)[0].architecture == HERE


def test_vastai_reports_the_architecture_of_each_machine() -> None:
    """Machines of one class and price are one offer only with the same processor.

    Grace boards are known to be arm64.
    """
    rows = [ask(1), ask(2, cpu_arch="amd64"), ask(3, cpu_arch="arm64"), ask(4, gpu_name="GH200 SXM", gpu_ram=97871)]
    read = [to_market_offer(row, (), is_spot=False) for row in rows]
    assert [one.offer.architecture for one in read if one is not None] == ["x86_64", "x86_64", "arm64", "arm64"]
    assert [offer.architecture for offer in merge(one.offer for one in read[:3] if one is not None)] == [
        "x86_64",
        "arm64",
    ]


@pytest.mark.parametrize(("reported", "architecture"), [("x86_64", "x86_64"), ("aarch64", "arm64"), ("riscv64", None)])
def test_a_host_reports_its_architecture(reported: str, architecture: str | None) -> None:
    """The command is `uname -m`. Other machines have no architecture, and match only without a requirement."""
    lines = f"::skyward vcpus 2\n::skyward memory_kib 1000000\n::skyward machine {reported}\n"
    host = _Host.of(HostAnswer.read(lines))
    assert host.architecture == architecture
    free = machine("hosts", 0.0, vcpus=1, memory_gb=0.5)
    assert host.unfit_for(free) == ""
    assert (host.unfit_for(free.model_copy(update={"architecture": "arm64"})) == "") is (architecture == "arm64")


def test_the_runtime_pins_have_wheels_for_both_architectures() -> None:
    """Each has a wheel for arm64 if it has one for x86_64, for both versions of Python (`uv.lock`)."""
    locked = {
        package["name"]: package
        for package in tomllib.loads((Path(__file__).parents[3] / "uv.lock").read_text())["package"]
    }
    needed, found = [pin.partition("==")[0] for pin in runtime_pins()], set[str]()
    while needed:
        name = needed.pop()
        if name not in found:
            found.add(name)
            needed += [one["name"] for one in locked[name].get("dependencies", []) if "marker" not in one]
    for name in sorted(found):
        files = [wheel["url"].rpartition("/")[2] for wheel in locked[name]["wheels"]]
        for version in ("cp312", "cp313"):
            fits = [
                file
                for file in files
                if "-none-any" in file
                or ("linux" in file and "aarch64" in file and (version in file or "abi3" in file))
            ]
            assert fits, f"{name} has no wheel for {version} on aarch64"
    assert len(found) > 10
