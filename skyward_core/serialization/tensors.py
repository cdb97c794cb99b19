"""The memory of PyTorch's tensors travels beside the pickle, as that of NumPy's arrays does.

PyTorch's own way copies the memory into a file in memory and that into the pickle. And it refuses a tensor of a GPU in
a process without one, so a client without a GPU could not read the weights that a node has trained.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# (PyTorch is an optional package)

from __future__ import annotations

import pickle
import sys
from typing import Any


def reduced(obj: Any) -> Any:
    """Return what pickles a storage of PyTorch, the memory of a tensor; NotImplemented for anything else.

    Memory of a GPU is copied to the processor's memory.
    """
    storages = sys.modules.get("torch.storage")
    if storages is None or type(obj) is not getattr(storages, "TypedStorage", None):
        return NotImplemented
    import torch

    memory = obj._untyped_storage
    data = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    try:
        buffer = pickle.PickleBuffer(data.cpu().numpy())
    except RuntimeError:  # NumPy is not there
        return NotImplemented
    return restored, (buffer, obj.dtype, str(memory.device))


def restored(buffer: Any, dtype: Any, device: str) -> Any:
    """Return the storage with these bytes: on its device if this process has it, or in the processor's memory."""
    import torch

    view = memoryview(buffer)
    if view.readonly:  # a tensor is always writable
        view = memoryview(bytearray(view))
    data = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)
    if _is_here(device):
        data = data.to(device)
    return torch.storage.TypedStorage(wrap_storage=data.untyped_storage(), dtype=dtype, _internal=True)


def _is_here(device: str) -> bool:
    import torch

    wanted = torch.device(device)
    if wanted.type == "cpu":
        return True
    module = getattr(torch, wanted.type, None)  # torch.cuda, torch.xpu
    return module is not None and module.is_available() and (wanted.index or 0) < module.device_count()
