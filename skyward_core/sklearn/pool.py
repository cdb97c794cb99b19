"""`JoblibPool` and `ScikitLearnPool`, and the context managers with which joblib runs on an open pool."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, ClassVar, Never, Self, Unpack

from skyward_core.errors import BadRequest
from skyward_core.events.events import Callback
from skyward_core.image.image import Image
from skyward_core.image.packages import canonical, name_of
from skyward_core.pool.pool import ComputePool
from skyward_core.pool.preparation import Prepared
from skyward_core.spec import PoolKeywords, PoolSpec
from skyward_core.work import NO_WORK, Work


@contextmanager
def joblib_backend(pool: ComputePool) -> Generator[ComputePool]:
    """Let `joblib.Parallel(n_jobs=...)` in this thread run on an open pool; afterwards the backend before is active
    again.

    `n_jobs=-1` is every slot of the pool. Without `n_jobs`, or with 1, nothing leaves this process, as with joblib
    itself. Raises BadRequest if joblib is not installed, and PoolClosed if the pool is not open.
    """
    parallel_config, backend = _backend_of(pool)
    _ = pool.lease  # raises
    with parallel_config(backend=backend):
        yield pool


@contextmanager
def sklearn_backend(pool: ComputePool) -> Generator[ComputePool]:
    """Let scikit-learn's estimators and searches with `n_jobs=-1` run on an open pool, as `joblib_backend` does."""
    with joblib_backend(pool):
        yield pool


def _backend_of(pool: ComputePool) -> tuple[Any, Any]:
    """Return `joblib.parallel_config` and a backend for it."""
    try:
        from joblib import parallel_config

        from skyward_core.sklearn.backend import PoolBackend
    except ImportError as error:
        raise BadRequest(f"joblib is needed here too: pip install joblib ({error})") from error
    return parallel_config, PoolBackend(pool)


def _signature(own: str) -> inspect.Signature:
    """Return the signature of `ComputePool` with one keyword more."""
    parameter = inspect.Parameter(own, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
    return inspect.Signature([parameter, *ComputePool.__signature__.parameters.values()])


class _BackendPool(ComputePool):
    """A pool that is joblib's backend within its `with` block, and whose image has one more package."""

    _package: ClassVar[str]
    _version: str | None = None

    def _reset(self, prepared: Prepared) -> None:
        is_local = all(provider.is_local for provider in prepared.providers)
        image = with_package(prepared.spec.image, self._package, self._version, is_local=is_local)
        if image is not prepared.spec.image:
            prepared = replace(prepared, spec=prepared.spec.with_(image=image))
        super()._reset(prepared)
        self._registered = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._registered.enter_context(joblib_backend(self))
        except BaseException as error:
            super().__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._registered.close()
        super().__exit__(kind, error, trace)


class JoblibPool(_BackendPool):
    """A `ComputePool` on which `joblib.Parallel(n_jobs=-1)` runs within the `with` block.

    Takes the keywords of `ComputePool`. `joblib_version` is installed on the nodes; None: the image's, or else the
    version of this process.

        with JoblibPool(provider=AWS(), nodes=4, concurrency=4):
            results = Parallel(n_jobs=-1)(delayed(fn)(x) for x in data)
    """

    _package = "joblib"
    __signature__: ClassVar = _signature("joblib_version")

    def __init__(
        self,
        *values: Never,
        joblib_version: str | None = None,
        spec: PoolSpec | None = None,
        on_event: Callback | None = None,
        work: Work = NO_WORK,
        **keywords: Unpack[PoolKeywords],
    ) -> None:
        self._version = joblib_version
        super().__init__(*values, spec=spec, on_event=on_event, work=work, **keywords)


class ScikitLearnPool(_BackendPool):
    """A `ComputePool` on which scikit-learn runs within the `with` block, wherever `n_jobs=-1` stands.

    Takes the keywords of `ComputePool`. `sklearn_version` is installed on the nodes; None: the image's, or else the
    version of this process.

        with ScikitLearnPool(provider=AWS(), nodes=4, concurrency=4):
            GridSearchCV(estimator, grid, n_jobs=-1).fit(X, y)
    """

    _package = "scikit-learn"
    __signature__: ClassVar = _signature("sklearn_version")

    def __init__(
        self,
        *values: Never,
        sklearn_version: str | None = None,
        spec: PoolSpec | None = None,
        on_event: Callback | None = None,
        work: Work = NO_WORK,
        **keywords: Unpack[PoolKeywords],
    ) -> None:
        self._version = sklearn_version
        super().__init__(*values, spec=spec, on_event=on_event, work=work, **keywords)


def with_package(image: Image, package: str, wanted: str | None, *, is_local: bool) -> Image:
    """Return the image with a package: in this version, else as the image has it, else in the version of this process.

    `is_local`: the nodes are processes of this machine, and a bare image has the packages of this process. Raises
    BadRequest if the image asks for the package too, or if it is needed and not installed here.
    """
    listed = next((entry for entry in image.pip if canonical(name_of(entry)) == package), None)
    if listed is not None and wanted is not None:
        raise BadRequest(f"the image has {listed!r} already: leave it out, or leave out the version {wanted!r}")
    if listed is not None or (wanted is None and (image.lock is not None or (is_local and image.is_bare))):
        return image
    try:
        chosen = wanted if wanted is not None else version(package)
    except PackageNotFoundError as error:
        raise BadRequest(f"{package} is needed here too: pip install {package}") from error
    fields: dict[str, Any] = {name: getattr(image, name) for name in image.model_fields_set}
    fields["pip"] = [*image.pip, f"{package}=={chosen}"]
    return Image(**fields)
