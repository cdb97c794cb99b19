"""The index of each package and the hashes of its files: real installations from two small indexes on this machine."""

import skyward_core as sky
from skyward_core.image.image import Image, runtime_pins
from skyward_core.image.packages import lacks


def test_a_pool_with_an_image_that_requires_hashes_runs() -> None:
    """All packages of a node are installed from the real package index, by their hashes."""

    @sky.compute
    def found() -> str:
        import six

        return six.__version__

    image = Image(pip=["six==1.17.0"], require_hashes=True)
    with sky.ComputePool(provider=sky.Local(), image=image, display="quiet") as pool:
        assert found() >> pool == "1.17.0"
    assert lacks(str(image.locked().lock), runtime_pins()) == []
