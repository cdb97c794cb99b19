"""One of several accelerators that a pool may have: `accelerator=["H100", "A100"]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from skyward_core.accelerators import Accelerator, parse
from skyward_core.errors import BadRequest

FIELDS = frozenset({"accelerator", "provider"})


@dataclass(frozen=True, slots=True, init=False)
class Alternative:
    """An accelerator that a pool may have, and the name of the only provider that may rent it; None: any of the pool's.

    A list of them, or of accelerators, is the pool's `accelerator=`; `selection=` says which is tried first.

    >>> str(Alternative("4xH100", provider="aws"))
    '4 x H100 80GB on aws'
    """

    accelerator: Accelerator
    provider: str | None = None

    def __init__(self, accelerator: str | Accelerator | Mapping[str, Any], provider: str | None = None) -> None:
        """`provider` is a name ("aws") and no value, because the pool has the value. Raises BadRequest."""
        if provider is not None and not isinstance(provider, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(
                f'provider={provider!r} of an alternative: write its name, as in provider="aws", and the provider'
                " itself among those of the pool, provider=[...]"
            )
        read = Accelerator.from_json(accelerator) if isinstance(accelerator, Mapping) else parse(accelerator)
        object.__setattr__(self, "accelerator", read)
        object.__setattr__(self, "provider", provider)

    @classmethod
    def read(cls, given: object) -> Self:
        """Read an accelerator, an alternative, or its plain data. Raises BadRequest."""
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping) and "accelerator" in given:
            if unknown := sorted(map(str, given.keys() - FIELDS)):  # pyright: ignore[reportUnknownArgumentType]
                raise BadRequest(f"an alternative has no {unknown[0]!r}; known are accelerator, provider")
            return cls(**{str(name): value for name, value in given.items()})  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        return cls(given)  # pyright: ignore[reportArgumentType] - the readers of accelerators refuse other types

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `read` reads."""
        return {"accelerator": self.accelerator.to_json(), "provider": self.provider}

    def __str__(self) -> str:
        return f"{self.accelerator}{f' on {self.provider}' if self.provider else ''}"
