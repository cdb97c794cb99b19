"""`import skyward_core`: every public name exists and has a docstring, and the import is cheap."""

import inspect

import pytest

import skyward_core as sky

# From the API reference (shared/seeds), as far as the core's first issue goes.
PROMISED = """
    compute PendingCompute gather ComputePool MultiPool Image Accelerator NVIDIA Spot SpotLike S3Volume Volume
    instance_info current_accelerator shard InstanceInfo compose emit use_callback Callback SkywardEvent ProviderName
    InfraCreating InfraCreated InstanceLaunching InstanceProvisioned BootstrapStarting BootstrapProgress BootstrapCompleted
    Metrics LogLine InstanceStopping CostUpdate CostFinal Error is_nvidia is_trainium
    PoolSpec Lease LeaseTampered Requirements Offer Provider Instance InstanceState Node Local Settings accelerators errors
"""


def test_the_promised_names_are_public() -> None:
    assert set(sky.__all__) >= set(PROMISED.split())
    assert set(sky.__all__) <= set(dir(sky))
    assert len(sky.__all__) == len(set(sky.__all__))


@pytest.mark.parametrize("name", sorted(sky.__all__))
def test_a_public_name_exists_and_has_a_docstring(name: str) -> None:
    value = getattr(sky, name)
    assert getattr(sky, name) is value
    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        doc = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
        assert doc and len(doc) > 20
        assert not doc.startswith(f"{name}("), "the docstring that dataclass writes"


KINDS = (sky.ComputePool, sky.MultiPool, sky.PendingCompute, sky.PendingBatch, sky.PoolSpec, sky.Image, sky.Provider)


@pytest.mark.parametrize("kind", KINDS)
def test_public_methods_have_docstrings(kind: type) -> None:
    ours = {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property | classmethod))
    }
    missing = [name for name, value in ours.items() if not inspect.getdoc(getattr(value, "__func__", value))]
    assert missing == []


def test_type_checkers_see_the_real_names() -> None:
    source = inspect.getsource(sky)
    block = source[source.index("if TYPE_CHECKING:") : source.index("__version__")]
    seen = {}
    for line in block.splitlines()[1:]:
        words = line.split()
        if words[:1] == ["from"]:
            assert words[3] == words[5]
            seen[words[3]] = words[1]
    assert set(seen) | {"compute"} == set(sky.__all__)
    for name, home in seen.items():
        value = getattr(sky, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__module__ == home, name
