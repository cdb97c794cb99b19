"""The former place of `skyward_core.sklearn`, with which joblib and scikit-learn run on a pool.

Everything is loaded when it is first used, joblib when a backend is registered.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward_core.sklearn.pool import JoblibPool as JoblibPool
    from skyward_core.sklearn.pool import ScikitLearnPool as ScikitLearnPool
    from skyward_core.sklearn.pool import joblib_backend as joblib_backend
    from skyward_core.sklearn.pool import sklearn_backend as sklearn_backend

__all__ = ["JoblibPool", "ScikitLearnPool", "joblib_backend", "sklearn_backend"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("skyward_core.sklearn.pool"), name)
    globals()[name] = value
    return value
