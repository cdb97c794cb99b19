"""An environment variable that a process sets often without using more memory each time.

setenv(3), and so `os.environ[name] = value`, keeps every value: glibc never frees one, because a caller may still use
it. A runner that did so for each call grew by 272 bytes a call (measured: 54 to 68 MB after 50,000 calls).
"""

import ctypes
import os
from typing import Any

_SPARE_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.putenv.argtypes = (ctypes.c_void_p,)


class RewrittenVariable:
    """One variable of this process's environment, in memory that is reused. Its value is padded with spaces at its end.

    `set` is called from one thread. Processes that are started later see the value, as with `os.environ`. The memory is
    never freed, because the environment uses it: make one for the life of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = os.fsencode(name)
        self._memory: int | None = None
        self._room = 0

    def set(self, value: str) -> None:
        """Set the variable. Raises ValueError for a NUL character, OSError where the system refuses."""
        text = self._name + b"=" + os.fsencode(value)
        if b"\0" in text:
            raise ValueError(f"an environment variable cannot hold a NUL character: {value!r}")
        if len(text) > self._room:  # rare: the texts of one runner differ by the id of a job
            self._room = len(text) + _SPARE_BYTES
            self._memory = _libc.calloc(1, self._room + 1)
        if not self._memory:
            raise MemoryError(f"no room for {len(text)} bytes")
        padded = text.ljust(self._room)
        ctypes.memmove(self._memory, padded, self._room)
        # putenv uses the pointer itself, setenv would copy; each time, because a call may have removed the variable
        if _libc.putenv(self._memory):
            raise OSError(ctypes.get_errno(), "putenv")
        _python_side()[self._name] = padded[len(self._name) + 1 :]


def _python_side() -> dict[Any, Any]:
    """Return the dictionary behind `os.environ`: a change of it does not call setenv."""
    return vars(os.environ)["_data"]
