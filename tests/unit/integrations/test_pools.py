"""The packages that `JoblibPool` and `ScikitLearnPool` add to an image, without machines."""

import inspect
from importlib.metadata import version
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import integrations

OURS = f"scikit-learn=={version('scikit-learn')}"


@pytest.mark.parametrize(
    ("image", "keywords", "expected"),
    [
        (sky.Image(), {}, (OURS,)),
        (sky.Image(pip=["numpy"]), {}, ("numpy", OURS)),
        (sky.Image(pip=["Scikit_Learn>=1.5"]), {}, ("Scikit_Learn>=1.5",)),
        (sky.Image(), {"sklearn_version": "1.6.1"}, ("scikit-learn==1.6.1",)),
        (sky.Image(lock="numpy==2.0.0 --hash=sha256:" + 64 * "0"), {}, ()),
    ],
)
def test_the_image_of_a_remote_pool_has_scikit_learn(
    image: sky.Image, keywords: dict[str, Any], expected: tuple[str, ...]
) -> None:
    """In the version that was asked for, else as the image says, else in the version of this process."""
    pool = sky.ScikitLearnPool(provider=sky.DigitalOcean(), image=image.model_copy(), **keywords)
    assert pool.spec.image.pip == expected
    assert pool.spec.image.lock == image.lock


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, ()),
        ({"joblib_version": "1.5.3"}, ("joblib==1.5.3",)),
        ({"image": sky.Image(pip=["requests"])}, ("requests", f"joblib=={version('joblib')}")),
    ],
)
def test_local_nodes_have_the_packages_of_this_process(keywords: dict[str, Any], expected: tuple[str, ...]) -> None:
    """As long as the image is bare."""
    assert sky.JoblibPool(provider=sky.Local(), **keywords).spec.image.pip == expected


def test_a_version_in_two_places_is_refused() -> None:
    with pytest.raises(sky.BadRequest, match=r"'joblib<2' already.*'1\.5\.3'"):
        sky.JoblibPool(provider=sky.Local(), image=sky.Image(pip=["joblib<2"]), joblib_version="1.5.3")


def test_other_fields_of_the_image_stay() -> None:
    image = sky.Image(env={"A": "1"}, apt=["git"], preload=["sklearn.tree"], cache=True)
    changed = sky.ScikitLearnPool(provider=sky.DigitalOcean(), image=image).spec.image
    assert changed == image.model_copy(update={"pip": (OURS,)})


@pytest.mark.parametrize(
    ("kind", "own"), [(sky.JoblibPool, "joblib_version"), (sky.ScikitLearnPool, "sklearn_version")]
)
def test_the_parameters_are_those_of_a_pool_and_one_more(kind: type, own: str) -> None:
    assert set(inspect.signature(kind).parameters) == {*inspect.signature(sky.ComputePool).parameters, own}


@pytest.mark.parametrize("name", ["JoblibPool", "ScikitLearnPool", "joblib_backend", "sklearn_backend"])
def test_the_names_of_the_reference(name: str) -> None:
    """At the top level, and in `integrations`."""
    assert getattr(integrations, name) is getattr(sky, name) is getattr(sky.integrations, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DaskPool"):
        _ = integrations.DaskPool  # type: ignore[attr-defined]
