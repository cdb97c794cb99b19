"""Python imports this when it starts on a node: the injector comes before everything else."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("refusals_injector", Path(__file__).parents[1] / "injector.py")
assert _spec is not None
assert _spec.loader is not None
_injector = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_injector)
if (_chosen := _injector.from_environment("node")) is not None:
    _injector.install(_chosen)
