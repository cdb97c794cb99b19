"""`PoolSpec`: one frozen value, equal after JSON. Bad input is refused before a machine is launched."""

import copy
import hashlib
import inspect
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

import skyward_core as sky
from skyward_core.ledger import tables
from skyward_core.providers import local
from skyward_core.spec import memory_gb

NUMBERS = ("int", "float")


def numeric_fields(kind: type[BaseModel]) -> list[str]:
    """The fields of a public type that are numbers."""
    found = [
        name
        for name, field in kind.model_fields.items()
        if any(word in str(field.annotation) for word in NUMBERS) and "Annotated" not in str(field.annotation)
    ]
    return [name for name in found if "print" not in name]


PUBLIC = (sky.PoolSpec, sky.Local, sky.Hosts, sky.AWS, sky.RunPod, sky.VastAI, sky.Verda, sky.DigitalOcean)


@pytest.mark.parametrize("value", [True, False, float("nan"), float("inf"), -float("inf"), "nan", "much"])
@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in PUBLIC for field in numeric_fields(kind)])
def test_no_number_of_a_public_type_is_a_boolean_or_has_no_size(
    kind: type[BaseModel], field: str, value: object
) -> None:
    """In words that name the field. True would be 1: a cent, a second or a machine that nobody has asked for."""
    make = sky.PoolSpec.of if kind is sky.PoolSpec else kind
    with pytest.raises(sky.BadRequest, match=field):
        make(**{field: value})


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), "inf", "much", -1, 0, [5]])
def test_sums_and_times_outside_of_a_spec_are_checked_as_its_fields(value: Any) -> None:
    spec = sky.PoolSpec.of(provider=sky.Local(), display="quiet")
    with pytest.raises(sky.BadRequest, match="run_max_cost"):
        sky.ComputePool.from_spec(spec, work=sky.Work(run="1"), run_max_cost=value)
    with pytest.raises(sky.BadRequest, match="lease_seconds"):
        sky.ComputePool.from_spec(spec).detach(value)
    with pytest.raises(sky.BadRequest, match="max_price_per_hour"):
        sky.offers(sky.Local(), max_price_per_hour=value)


def test_a_number_may_be_a_text_wherever_a_limit_is_given() -> None:
    """As in settings and forms: for max_cost, run_max_cost and prices alike."""
    spec = sky.PoolSpec.of(provider=sky.Local(price_per_hour="0.5"), display="quiet", max_cost="5")
    assert (spec.max_cost, spec.providers[0].price_per_hour) == (5.0, 0.5)
    sky.ComputePool.from_spec(spec, work=sky.Work(run="1"), run_max_cost="5")
    assert sky.offers(sky.Local(), max_price_per_hour="5")


FULL: dict[str, Any] = {
    "provider": sky.Local(price_per_hour=1.2),
    "image": sky.Image(pip=["torch"], env={"A": "1"}),
    "nodes": (3, 5),
    "machine": "p5.48xlarge",
    "accelerator": ["A100-40GB", sky.Alternative("T4", provider="aws")],
    "selection": "cheapest",
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
    "max_hourly_cost": 9.5,
    "max_price_ratio": 2.5,
    "env": {"B": "2"},
    "secrets": {"C": sky.Secret.from_env("D")},
    "concurrency": 2,
    "provision_timeout": 90.0,
    "architecture": "arm64",
    "display": "quiet",
    "output": "head",
    "collect_metrics": False,
    "name": "nightly",
    "keep_warm": 600.0,
    "scale_up_after": 10.0,
    "scale_down_after": 60.0,
}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.Local, "launch", lambda *_: pytest.fail("a machine was launched"))


def test_the_defaults_are_those_of_the_reference() -> None:
    spec = sky.PoolSpec()
    empty = ("provider", "machine", "accelerator", "cpu", "memory", "max_lifetime", "max_cost", "spot", "env")
    assert [name for name in empty if getattr(spec, name) is not None] == []
    assert (spec.nodes, spec.timeout, spec.concurrency, spec.display, spec.collect_metrics) == (1, 3600, 1, "log", True)
    assert (spec.image, spec.lease_seconds, spec.retries, tuple(spec.volume)) == (sky.Image(), 120, 3, ())


def test_a_spec_survives_json() -> None:
    """Which fields were set survives `exclude_unset`, so that settings can still fill the others."""
    spec = sky.PoolSpec.of(**FULL)
    assert set(FULL) == set(sky.PoolSpec.model_fields)
    text = spec.model_dump_json()
    again = sky.PoolSpec.model_validate_json(text)
    assert again == spec == sky.PoolSpec.of(**json.loads(text))
    assert again.model_dump_json() == text
    assert again.provider == sky.Local(price_per_hour=1.2)
    small = sky.PoolSpec.model_validate_json(sky.PoolSpec.of(nodes=2).model_dump_json(exclude_unset=True))
    assert (small, small.model_fields_set) == (sky.PoolSpec.of(nodes=2), {"nodes"})


def test_with_returns_a_new_spec() -> None:
    spec = sky.PoolSpec.of(nodes=2)
    assert spec.with_(nodes=4) == sky.PoolSpec.of(nodes=4)
    assert spec.with_(cpu=2).model_fields_set == {"nodes", "cpu"}
    assert spec.nodes == 2
    with pytest.raises(sky.BadRequest, match="nodes"):
        spec.with_(nodes="many")


def test_the_requirements_are_the_hardware_part() -> None:
    want = sky.PoolSpec.of(machine="x", accelerator="T4", cpu=8, memory="16GiB").requirements
    assert (want.instance_type, want.vcpus, want.max_price_per_hour) == ("x", 8, None)
    assert want.memory_gb == pytest.approx(17.179869184)
    assert want.accelerator == sky.Accelerator.NVIDIA.T4()


def test_packages_of_a_pool_are_those_of_its_image() -> None:
    """`pip=[...]` is short for `image=Image(pip=[...])`; with both, they join."""
    image = sky.Image(pip=["numpy"], apt=["git"])
    spec = sky.PoolSpec.of(image=image, pip=["torch"])
    assert spec == sky.PoolSpec.of(image=sky.Image(pip=["numpy", "torch"], apt=["git"]))
    assert sky.PoolSpec.of(pip=["torch"]) == sky.PoolSpec.of(image=sky.Image(pip=["torch"]))
    assert sky.PoolSpec.of(pip=["torch"], image={"pip": ["numpy"]}).image.pip == ("numpy", "torch")
    assert spec.with_(pip=["six"]).image.pip == ("numpy", "torch", "six")
    assert sky.ComputePool(provider=sky.Local(), pip=["torch"]).spec.image.pip == ("torch",)
    with pytest.raises(sky.BadRequest, match="pip"):
        sky.PoolSpec.of(pip="torch")


@pytest.mark.parametrize(
    ("text", "gb"),
    [("32GB", 32.0), ("512 MB", 0.512), ("1TB", 1000.0), ("1GiB", 1.073741824), ("1.5 tib", 1649.267441664), (" 2gb ", 2)],
)  # fmt: skip
def test_amounts_of_memory(text: str, gb: float) -> None:
    assert memory_gb(text) == pytest.approx(gb, rel=1e-12)


def test_the_signature_has_every_keyword_with_its_type_and_default() -> None:
    """`ComputePool(**fields)` has the spec of the fields; the types for checkers name exactly these fields."""
    shown = inspect.signature(sky.ComputePool).parameters
    assert list(shown) == ["spec", "on_event", "work", *sky.PoolKeywords.__annotations__]
    assert set(sky.PoolKeywords.__annotations__) == {"pip", *sky.PoolSpec.model_fields}
    for name, field in sky.PoolSpec.model_fields.items():
        assert shown[name].default == field.get_default(call_default_factory=True)
        assert shown[name].annotation is not inspect.Parameter.empty
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    defaults = {name: parameter.default for name, parameter in shown.items() if name in sky.PoolSpec.model_fields}
    assert sky.PoolSpec.of(**defaults) == sky.PoolSpec()
    fields = {"provider": sky.Local(), "nodes": 2, "display": "quiet"}
    assert sky.ComputePool(**fields).spec == sky.PoolSpec.of(**fields)
    assert sky.ComputePool.from_spec(sky.PoolSpec.of(**fields)).spec == sky.PoolSpec.of(**fields)
    assert sky.ComputePool(spec=sky.PoolSpec.of(**fields)).spec == sky.PoolSpec.of(**fields)


NO_PRICES = (float("inf"), float("nan"), 1e300, 100_001.0, -1.0)

# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"node": 2}, "'nodes'"),
        ({"acelerator": "A100"}, "'accelerator'"),
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": "many"}, "nodes='many'"),
        ({"nodes": (8, 1)}, "nodes=(8, 1): the least number comes first, so write nodes=(1, 8)"),
        ({"nodes": (0, 3)}, "so write nodes=(1, 3)"),
        ({"nodes": 2, "scale_up_after": 5}, "scale_up_after is for a pool that grows"),
        ({"nodes": (1, 2), "scale_down_after": -1}, "scale_down_after=-1"),
        *(
            ({"nodes": nodes}, "a pool has at most 1,000 machines")
            for nodes in (1001, 10**23, "9" * 5000, (1, 10**400))
        ),
        *(({"nodes": nodes}, "write how many machines") for nodes in ("1e3", 1000.0, float("inf"), float("nan"), True)),
        *(
            ({name: value}, f"{name}={value}")
            for name in ("timeout", "max_lifetime", "provision_timeout", "scale_up_after", "keep_warm", "max_cost")
            for value in (float("inf"), float("nan"), 1e300)
        ),
        ({"memory": f"{'9' * 400}GB"}, "is no amount of memory"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout": 0}, "timeout=0"),
        *(({"lease_seconds": seconds}, "lease_seconds") for seconds in (4.9, 1e12, float("inf"), float("nan"))),
        ({"accelerator": "H1000"}, "H100"),
        ({"memory": "32 gigs"}, "32GB"),
        ({"spot": "alway"}, 'did you mean "always"?'),
        ({"spot": "sometimes"}, 'Write "always", "if-available", "never", a share such as 0.8'),
        ({"spot": 2.0}, "0.02"),
        ({"allocation": "spot"}, 'it is spot="always", "if-available", "never"'),
        ({"display": "loud"}, "quiet"),
        ({"provider": "locl"}, "'local'"),
        ({"console": "spinner"}, 'it is display="spinner"'),
        ({"max_hourly_price": 5}, "it is max_hourly_cost=5, for all machines of the pool, in USD per hour"),
        ({"max_hourly_cost": 0}, "max_hourly_cost"),
        ({"max_nodes": 5}, "it is nodes=(1, 8)"),
        ({"lifetime": 60}, "did you mean 'max_lifetime'?"),
        ({"KeepWarm": 60}, "did you mean 'keep_warm'?"),
        ({"colour": "red"}, "there is no 'colour'; known are: provider, image,"),
        ({"provider": {"name": "local", "price": 1}}, "price"),
        ({"provider": {"name": "aws", "regio": 1}}, "AWS has no field 'regio'"),
        ({"provider": sky.AWS}, "write sky.AWS()"),
        ({"provider": [sky.AWS]}, "write sky.AWS()"),
        ({"provider": 5}, 'write a name such as "aws"'),
        ({"image": sky.Image}, "write sky.Image(...)"),
        ({"image": {"pipp": []}}, "did you mean 'pip'?"),
        ({"volume": "/data"}, "volume"),
    ],
    ids=str,
)
def test_a_wrong_spec_is_refused_with_advice(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(sky.BadRequest) as caught:
        sky.ComputePool(**{"provider": sky.Local(), **options})
    assert advice in str(caught.value)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(sky.BadRequest):
        sky.PoolSpec.of(**options)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("manual__2026-11-26T10:00:00.5+00:00_a~1", "manual__2026-11-26T10:00:00.5+00:00_a~1"),
        ("2026-11-26|eu=1,2", "2026-11-26|eu=1,2"),
        ("team/nightly@eu", "team/nightly@eu"),
        ("a b", f"a-b-{hashlib.sha256(b'a b').hexdigest()[:8]}"),
        ("__x", f"x-{hashlib.sha256(b'__x').hexdigest()[:8]}"),
        ("é", f"pool-{hashlib.sha256('é'.encode()).hexdigest()[:8]}"),
        ("x" * 250, f"{'x' * 119}-{hashlib.sha256(b'x' * 250).hexdigest()[:8]}"),
    ],
)
def test_a_name_holds_what_run_ids_hold(given: str, name: str) -> None:
    """What it cannot hold is replaced, as docs/shared-pools.md says; the result stays as it is."""
    assert sky.PoolSpec.of(name=given).name == name
    assert sky.PoolSpec.of(name=name).name == name
    assert len(name) <= tables.NAME_CHARACTERS


def test_credentials_on_a_provider_travel_in_memory_and_are_refused_in_plain_data() -> None:
    """JSON leaves them out. So whoever makes plain data of a spec asks first."""
    keys = {"access_key_id": "AKIA1", "secret_access_key": "s3cr3t"}
    for given in (sky.AWS(**keys), {"name": "aws", **keys}, [sky.Local(), sky.AWS(**keys)]):
        spec = sky.PoolSpec.of(provider=given)
        for again in (spec.with_(nodes=2), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
            assert again.providers[-1].secret_access_key.get_secret_value() == "s3cr3t"
        pool = sky.ComputePool.from_spec(spec)
        assert pool.spec.providers[-1] == sky.AWS(**keys)
        assert spec.providers[-1].written_credentials == ("access_key_id", "secret_access_key")
        with pytest.raises(sky.BadRequest) as caught:
            spec.refuse_written_credentials("a form", "write {kind}Credentials({field}=...)")
        assert str(caught.value) == (
            "access_key_id, secret_access_key of provider 'aws' cannot be kept in a form: write"
            " AWSCredentials(access_key_id=...)"
        )
    sky.PoolSpec.of(provider=sky.AWS(region="us-east-1")).refuse_written_credentials("a form", "")


@pytest.mark.parametrize("name", ["", " ", "+", "a\nb", "a\0"])
def test_a_name_without_letters_or_with_control_characters_is_refused(name: str) -> None:
    with pytest.raises(sky.BadRequest, match="write letters and digits"):
        sky.PoolSpec.of(name=name)


@pytest.mark.parametrize("name", ["nodes", "concurrency", "retries", "cpu"])
def test_a_number_of_thousands_of_digits_is_refused_and_not_shown(name: str) -> None:
    """Python refuses to show it; the message says so."""
    with pytest.raises(sky.BadRequest, match=f"{name}=a longer number"):
        sky.PoolSpec.of(**{name: 10**5000})


@pytest.mark.parametrize(
    ("ask", "advice"),
    [
        (lambda: sky.Image(pipp=["torch"]), "Image has no field 'pipp': did you mean 'pip'?"),
        (lambda: sky.AWS(regio="x"), "AWS has no field 'regio': did you mean 'region'?"),
        (lambda: sky.AWS(console=1), "AWS has no field 'console': known are region, "),
        (lambda: sky.Image(packages=["six"]), "did you mean 'pip'?"),
        (lambda: sky.AWS(region=5), "region"),
        (lambda: sky.S3Volume(), "S3Volume needs 'mount_path': write S3Volume(mount_path=...)"),
        (lambda: sky.S3Volume(mount_path="/d", bukket="abc"), "S3Volume has no field 'bukket': did you mean 'bucket'?"),
        (lambda: sky.S3Volume(mount_path="/d", bucket=5), "bucket=5"),
        *((lambda usd=usd: sky.Local(price_per_hour=usd), f"price_per_hour={usd}") for usd in NO_PRICES),
        *((lambda usd=usd: sky.Hosts("a", price_per_hour=usd), "price_per_hour") for usd in NO_PRICES),
        *((lambda usd=usd: sky.VastAI(bid_margin=usd), "bid_margin") for usd in (float("inf"), float("nan"))),
    ],
)
def test_a_wrong_image_provider_or_volume_is_refused_with_advice(ask: Callable[[], object], advice: str) -> None:
    with pytest.raises(sky.BadRequest) as caught:
        ask()
    assert advice in str(caught.value)


def test_all_faults_are_in_one_message() -> None:
    with pytest.raises(sky.BadRequest, match=r"nodes=0[\s\S]*cpu=0"):
        sky.ComputePool(provider=sky.Local(), nodes=0, cpu=0)


def test_another_python_is_refused_with_the_reason() -> None:
    other = "3.12" if sys.version_info.minor != 12 else "3.13"
    with pytest.raises(sky.BadRequest, match="pickle") as caught:
        sky.ComputePool(provider=sky.Local(), image=sky.Image(python=other))
    assert other in str(caught.value)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"volume": sky.S3Volume(mount_path="/data", bucket="weather")}, "volume"),
        ({"accelerator": sky.Accelerator.NVIDIA.H100(mig="3g.40gb")}, "mig"),
        ({"image": sky.Image(apt=["ffmpeg"])}, "apt"),
        ({"image": sky.Image(shell=["true"])}, "shell"),
    ],
)
def test_a_setting_that_local_does_not_support_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(sky.NotYetSupported, match=f"local does not do {name}: ") as caught:
        sky.ComputePool(provider=sky.Local(), **options)
    assert isinstance(caught.value, NotImplementedError)


def test_a_wrong_secret_is_not_shown() -> None:
    with pytest.raises(sky.BadRequest) as caught:
        sky.RunPod(api_key=271828)  # type: ignore[arg-type]
    assert "271828" not in f"{caught.value} {caught.value.__cause__}"
