"""Bad input gets a clear error before anything starts."""

import sys
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.providers import local

OTHER_PYTHON = "3.12" if sys.version_info.minor != 12 else "3.13"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that fails the test when a machine is launched."""
    monkeypatch.setattr(local.Local, "launch", lambda *_: pytest.fail("a machine was launched"))


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
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"accelerator": "H1000"}, "H100"),
        ({"memory": "32 gigs"}, "32GB"),
        ({"spot": "allways"}, "always"),
        ({"spot": 2.0}, "0.02"),
        ({"display": "loud"}, "quiet"),
        ({"provider": "locl"}, "'local'"),
        ({"provider": {"name": "local", "price": 1}}, "price"),
        ({"volume": "/data"}, "volume"),
    ],
    ids=str,
)
def test_a_wrong_spec_is_refused_with_advice(options: dict[str, Any], advice: str) -> None:
    """Each wrong keyword or value raises BadRequest, a ValueError, which names the correct one."""
    with pytest.raises(sky.BadRequest) as caught:
        sky.ComputePool(**{"provider": sky.Local(), **options})
    assert advice in str(caught.value)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(sky.BadRequest):
        sky.PoolSpec.of(**options)


def test_all_faults_are_in_one_message() -> None:
    """Two wrong values are both in the message."""
    with pytest.raises(sky.BadRequest) as caught:
        sky.ComputePool(provider=sky.Local(), nodes=0, cpu=0)
    assert "nodes=0" in str(caught.value)
    assert "cpu=0" in str(caught.value)


def test_another_python_is_refused_with_the_reason() -> None:
    """An image with another Python than the client's is refused before money is spent; the message names both and what
    to do.
    """
    with pytest.raises(sky.BadRequest) as caught:
        sky.ComputePool(provider=sky.Local(), image=sky.Image(python=OTHER_PYTHON))
    assert OTHER_PYTHON in str(caught.value)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(caught.value)
    assert "pickle" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"volume": sky.S3Volume(mount_path="/data", bucket="weather")}, "volume"),
        ({"accelerator": sky.Accelerator.NVIDIA.H100(mig="3g.40gb")}, "mig"),
        ({"image": sky.Image(apt=["ffmpeg"])}, "apt"),
    ],
)
def test_a_setting_that_local_does_not_support_is_refused(options: dict[str, Any], name: str) -> None:
    """It raises NotYetSupported, a NotImplementedError, which names the setting and the providers that support it."""
    with pytest.raises(sky.NotYetSupported) as caught:
        sky.ComputePool(provider=sky.Local(), **options)
    assert isinstance(caught.value, NotImplementedError)
    assert f"local does not do {name}: " in str(caught.value)


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def double(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize("target", [3, "pool", None, [1], double, sky.ComputePool], ids=repr)
def test_only_a_pool_can_be_the_right_operand(target: Any) -> None:
    """`>>` and `@` with another object raise TypeError, which shows the correct form."""
    for use in (lambda: double(1) >> target, lambda: double(1) @ target, lambda: (double(1) & double(2)) >> target):
        with pytest.raises(TypeError, match=r"with sky\.ComputePool"):
            use()


def test_a_function_in_place_of_its_call_is_explained() -> None:
    """A lazy function in place of its call raises an error that says so; so does a plain value."""
    with pytest.raises(TypeError, match=r"double\(\.\.\.\)"):
        double(1) & double  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"double\(\.\.\.\)"):
        sky.gather(double(1), double)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="@compute"):
        sky.gather(42)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parentheses"):
        double(1) & 42  # type: ignore[operator]
