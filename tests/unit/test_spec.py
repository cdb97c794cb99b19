"""`PoolSpec`: one frozen value, equal after a conversion to JSON and back."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.spec import memory_gb

FULL: dict[str, Any] = {
    "provider": sky.Local(price_per_hour=1.2),
    "image": sky.Image(pip=["torch"], env={"A": "1"}),
    "nodes": (3, 5),
    "machine": "p5.48xlarge",
    "accelerator": "A100-40GB",
    "cpu": 4,
    "memory": "32GB",
    "volume": (sky.S3Volume(mount_path="/data", bucket="weather"),),
    "spot": 0.8,
    "timeout": 60,
    "max_lifetime": 7200.0,
    "lease_seconds": 60.0,
    "retries": 1,
    "budget": "team-a",
    "max_cost": 12.5,
    "env": {"B": "2"},
    "secrets": {"C": sky.Secret.from_env("D")},
    "concurrency": 2,
    "provision_timeout": 90.0,
    "architecture": "arm64",
    "display": "quiet",
    "collect_metrics": False,
    "name": "nightly",
    "keep_warm": 600.0,
    "scale_up_after": 10.0,
    "scale_down_after": 60.0,
}


def test_the_defaults_are_those_of_the_reference() -> None:
    """An empty spec is one node, an idle time of an hour, one call at a time, the display "log" and metrics."""
    spec = sky.PoolSpec()
    assert (spec.provider, spec.nodes, spec.machine, spec.accelerator, spec.cpu, spec.memory) == (
        None,
        1,
        None,
        None,
        None,
        None,
    )
    assert (spec.timeout, spec.concurrency, spec.display, spec.collect_metrics) == (3600, 1, "log", True)
    assert spec.image == sky.Image()
    assert (spec.lease_seconds, spec.retries) == (120, 3)
    assert (spec.max_lifetime, spec.max_cost, spec.spot, spec.env, tuple(spec.volume)) == (None, None, None, None, ())


def test_a_spec_survives_json() -> None:
    """With every field set, a spec is equal after JSON, by pydantic and by hand, and so is its hash of JSON."""
    spec = sky.PoolSpec.of(**FULL)
    assert set(FULL) == set(sky.PoolSpec.model_fields)
    text = spec.model_dump_json()
    again = sky.PoolSpec.model_validate_json(text)
    assert again == spec
    assert again.model_dump_json() == text
    assert sky.PoolSpec.of(**json.loads(text)) == spec
    assert isinstance(again.provider, sky.Local)
    assert again.provider.price_per_hour == 1.2
    assert again.accelerator is not None
    assert again.accelerator.name == "A100-40GB" or again.accelerator.name.startswith("A100")


def test_fields_that_were_not_set_are_not_set_after_json() -> None:
    """Which fields were set survives `exclude_unset`, so that settings can still fill the others."""
    spec = sky.PoolSpec.of(nodes=2)
    again = sky.PoolSpec.model_validate_json(spec.model_dump_json(exclude_unset=True))
    assert again == spec
    assert again.model_fields_set == {"nodes"}


@pytest.mark.parametrize("seconds", [4.9, 1e12, float("inf"), float("nan")])
def test_a_lease_has_a_minimum_and_a_maximum(seconds: float) -> None:
    """Neither shorter than one renewal may take, nor longer than any machine lives. A time beyond the last date is
    refused here.
    """
    with pytest.raises(sky.BadRequest, match="lease_seconds"):
        sky.PoolSpec.of(lease_seconds=seconds)
    assert sky.PoolSpec.of(lease_seconds=86_400).lease_seconds == 86_400


def test_with_returns_a_new_spec() -> None:
    """`with_` returns a new spec, validated again, and does not change the old one."""
    spec = sky.PoolSpec.of(nodes=2)
    assert spec.with_(nodes=4) == sky.PoolSpec.of(nodes=4)
    assert spec.with_(cpu=2).model_fields_set == {"nodes", "cpu"}
    assert spec.nodes == 2
    with pytest.raises(sky.BadRequest, match="nodes"):
        spec.with_(nodes="many")


def test_the_requirements_are_the_hardware_part() -> None:
    """Requirements hold machine, accelerator, processors and memory in GB of 10⁹ bytes."""
    want = sky.PoolSpec.of(machine="x", accelerator="T4", cpu=8, memory="16GiB").requirements
    assert (want.instance_type, want.vcpus, want.max_price_per_hour) == ("x", 8, None)
    assert want.memory_gb == pytest.approx(17.179869184)
    assert want.accelerator == sky.Accelerator.NVIDIA.T4()


@pytest.mark.parametrize(
    ("text", "gb"),
    [
        ("32GB", 32.0),
        ("512 MB", 0.512),
        ("1TB", 1000.0),
        ("1GiB", 1.073741824),
        ("512MiB", 0.536870912),
        ("1.5 tib", 1649.267441664),
        (" 2gb ", 2.0),
    ],
)
def test_amounts_of_memory(text: str, gb: float) -> None:
    """GB is 10⁹ bytes and GiB 2³⁰, in any case and with or without a space."""
    assert memory_gb(text) == pytest.approx(gb, rel=1e-12)


def test_a_pool_takes_the_fields_of_a_spec() -> None:
    """ComputePool(**fields) and ComputePool.from_spec(spec) have the same spec."""
    fields = {"provider": sky.Local(), "nodes": 2, "display": "quiet"}
    assert (
        sky.ComputePool(**fields).spec
        == sky.ComputePool.from_spec(sky.PoolSpec.of(**fields)).spec
        == sky.PoolSpec.of(**fields)
    )


@pytest.mark.parametrize(
    ("ask", "advice"),
    [
        (lambda: sky.Image(pipp=["torch"]), "Image has no field 'pipp': did you mean 'pip'?"),
        (lambda: sky.Image(python=3), "python: Input should be a valid string"),
        (lambda: sky.AWS(regio="x"), "AWS has no field 'regio': did you mean 'region'?"),
        (lambda: sky.AWS(region=5), "region"),
        (lambda: sky.S3Volume(), "S3Volume needs 'mount_path': write S3Volume(mount_path=...)"),
        (lambda: sky.S3Volume(mount_path="/d", bukket="abc"), "S3Volume has no field 'bukket': did you mean 'bucket'?"),
        (lambda: sky.S3Volume(mount_path="/d", bucket=5), "bucket=5"),
        (lambda: sky.ComputePool(provider=sky.AWS), "write sky.AWS()"),
        (lambda: sky.ComputePool(provider=[sky.AWS]), "write sky.AWS()"),
        (lambda: sky.ComputePool(provider=5), 'write a name such as "aws"'),
        (lambda: sky.ComputePool(provider={"name": "aws", "regio": 1}), "AWS has no field 'regio'"),
        (lambda: sky.ComputePool(image=sky.Image), "write sky.Image(...)"),
        (lambda: sky.ComputePool(image={"pipp": []}), "did you mean 'pip'?"),
        (lambda: sky.ComputePool(allocation="spot"), 'it is spot="always", "if-available", "never"'),
        (lambda: sky.ComputePool(spot="sometimes"), 'Write "always", "if-available", "never", a share such as 0.8'),
        (lambda: sky.ComputePool(spot="alway"), 'did you mean "always"?'),
    ],
)
def test_every_mistake_in_a_spec_is_a_bad_request_with_the_correction(ask: Callable[[], object], advice: str) -> None:
    """Images, providers and volumes raise what pools raise, and name the nearest field or what to write."""
    with pytest.raises(sky.BadRequest) as caught:
        ask()
    assert advice in str(caught.value)


def test_a_wrong_secret_is_not_shown() -> None:
    """If a provider has a secret, neither an error nor its cause has its value."""
    with pytest.raises(sky.BadRequest) as caught:
        sky.RunPod(api_key=271828)  # type: ignore[arg-type]
    assert "271828" not in f"{caught.value} {caught.value.__cause__}"


def test_the_signature_has_every_keyword_with_its_type_and_default() -> None:
    """The signature of a pool has each field of PoolSpec with its default. The types for checkers name exactly these
    fields.
    """
    shown = inspect.signature(sky.ComputePool).parameters
    assert list(shown) == ["on_event", "work", *sky.PoolSpec.model_fields]
    assert set(sky.Wishes.__annotations__) == set(sky.PoolSpec.model_fields)
    for name, field in sky.PoolSpec.model_fields.items():
        assert shown[name].default == field.get_default(call_default_factory=True)
        assert shown[name].annotation is not inspect.Parameter.empty
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    defaults = {name: parameter.default for name, parameter in shown.items() if name in sky.PoolSpec.model_fields}
    assert sky.PoolSpec.of(**defaults) == sky.PoolSpec()
