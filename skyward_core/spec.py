"""`PoolSpec`: the user's request, as one frozen value. Each setting is declared once, here."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, Unpack, cast, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializeAsAny,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from skyward_core import accelerators
from skyward_core.accelerators import Accelerator
from skyward_core.accelerators.alternative import Alternative
from skyward_core.accelerators.catalog import find
from skyward_core.accelerators.neuron import slot_cores
from skyward_core.errors import BadRequest, question
from skyward_core.frozen import explained, without_booleans
from skyward_core.image.image import FrozenEnv, Image, refuse_unexportable
from skyward_core.image.volume import Volume, refuse_overlaps
from skyward_core.machines import spot
from skyward_core.machines.offers import Architecture, Offer, Requirements, memory_gb
from skyward_core.providers import base
from skyward_core.providers.base import Provider
from skyward_core.secret import Secret, as_references, looks_secret, masked, refuse_masks
from skyward_core.written_numbers import LONGEST_SECONDS, MOST_DIGITS, MOST_RETRIES, shown, whole_of_digits

OTHER_NAMES = {
    "allocation": 'spot="always", "if-available", "never" or a share such as 0.8',
    "cloud": 'provider="aws"',
    "console": 'display="spinner", "log" or "quiet"',
    "gpu": 'accelerator="A100"',
    "gpus": 'accelerator="4xA100"',
    "instance_type": 'machine="p5.48xlarge"',
    "region": 'the provider\'s: provider=sky.AWS(region="us-east-1")',
    "max_hourly_price": "max_hourly_cost=5, for all machines of the pool, in USD per hour",
    "max_price_per_hour": "max_hourly_cost=5, for all machines of the pool, in USD per hour",
    "max_nodes": "nodes=(1, 8)",
    "min_nodes": "nodes=(1, 8)",
    "num_nodes": "nodes=2",
    "use_spot": 'spot="always"',
    "volumes": "volume=[...]",
}
"""Names of other libraries for the same setting."""

MOST_NODES = 1000
"""Machines of one pool. No more were ever tried: one scheduler serves them all (docs/performance.md)."""
MOST_RATIO = 1_000_000.0
"""Of two prices of machines; so much is no limit."""
MOST_SLOTS = 1024
"""Calls at once on one worker: each has its own process."""
MOST_CORES = 100_000
NAME_CHARACTERS = 128
"""The longest name of a pool in the ledger."""
MOST_USD = 1e12
"""The ledger counts whole micro-dollars in 64 bits."""

type Display = Literal["log", "spinner", "quiet"]
type Output = Literal["all", "head"]

type AnyProvider = Annotated[
    SerializeAsAny[Provider] | tuple[SerializeAsAny[Provider], ...],
    BeforeValidator(lambda given: _loaded(given)),
    PlainSerializer(lambda one: _plain(one)),
]
type AnyAccelerator = Annotated[
    Accelerator | tuple[Alternative, ...],
    BeforeValidator(lambda given: _accelerators(given)),
    PlainSerializer(
        lambda given: [one.to_json() for one in given] if isinstance(given, tuple) else given.to_json(),
        return_type=dict[str, Any] | list[dict[str, Any]],
    ),
]
"""The accelerators of one machine, or alternatives in the order of the user."""
type Selection = Literal["first", "cheapest"]
type AnySpot = Annotated[
    spot.Strategy,
    BeforeValidator(lambda given: spot.from_json(given) if isinstance(given, Mapping) else spot.parse(given)),
    PlainSerializer(spot.to_json),
]
type NodeCount = Annotated[int | tuple[int, int], BeforeValidator(lambda given: _node_count(given))]
"""A number of machines, or the least and the most of a pool that grows and shrinks."""
type PoolName = Annotated[str, BeforeValidator(lambda given: pool_name(given))]
"""A name as the ledger has it."""
type Secrets = Annotated[Mapping[str, Secret], BeforeValidator(as_references)]
UNREPEATED = frozenset({"env", "secrets"})
"""Fields with values that no message repeats."""


class PoolKeywords(TypedDict, total=False):
    """The keywords of `ComputePool`, for editors and type checkers: the types that each field of `PoolSpec` accepts.
    `PoolSpec` has their defaults and meanings; `pip` adds to the packages of the image.
    """

    provider: str | Provider | Mapping[str, Any] | Sequence[str | Provider | Mapping[str, Any]] | None
    image: Image | Mapping[str, Any]
    pip: Sequence[str]
    nodes: int | tuple[int, int]
    machine: str | None
    accelerator: (
        str | Accelerator | Mapping[str, Any] | Sequence[str | Accelerator | Alternative | Mapping[str, Any]] | None
    )
    selection: Selection
    cpu: int | None
    memory: str | None
    architecture: Architecture | None
    volume: Volume | Sequence[Volume | Mapping[str, Any]] | None
    spot: spot.SpotLike | Mapping[str, Any] | None
    timeout: float
    max_lifetime: float | None
    lease_seconds: float
    retries: int
    max_cost: float | None
    max_hourly_cost: float | None
    max_price_ratio: float
    budget: str | None
    env: Mapping[str, str] | None
    secrets: str | Sequence[str] | Mapping[str, Any] | None
    concurrency: int
    provision_timeout: float
    display: Display
    output: Output
    collect_metrics: bool
    name: str | None
    keep_warm: float
    scale_up_after: float
    scale_down_after: float


class PoolSpec(BaseModel):
    """The user's request. Compares by value; converts to JSON and back (`model_dump_json`, `model_validate_json`).

    It holds references to secrets and not their values. Probable secrets in `env` and in the image's `env` are masked
    in repr and JSON, so they do not come back from JSON: a spec with a mask can be read and shown, but no pool opens
    with it.

    Make one with `PoolSpec.of(...)`: it raises BadRequest, with the nearest known name for an unknown field.
    """

    examples: ClassVar[Mapping[str, str]] = {
        "memory": '"64GB"',
        "volume": 'sky.S3Volume(bucket="name", mount="/data")',
        "image": 'sky.Image(pip=["torch"])',
        "env": '{"NAME": "value"}',
        "secrets": '["HF_TOKEN"]',
        "name": '"nightly"',
        "machine": '"p5.48xlarge"',
    }

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        validate_default=False,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    provider: AnyProvider | None = Field(
        default=None,
        description="Who rents the machines, or several to choose from; None: as the settings say, else Local().",
    )
    image: Image = Field(default_factory=Image, description="The environment on the nodes.")
    nodes: NodeCount = Field(
        default=1,
        description="Number of machines; (least, most): the pool grows with its queue, and shrinks when it is idle.",
    )
    machine: str | None = Field(
        default=None, description='Instance type, in the provider\'s own words ("p5.48xlarge").'
    )
    accelerator: AnyAccelerator | None = Field(
        default=None, description="The accelerators of one machine; a list has alternatives, the best first."
    )
    selection: Selection = Field(
        default="first",
        description='Which alternative of `accelerator` is rented: the "first" that is to be had, or the "cheapest".',
    )
    cpu: int | None = Field(default=None, ge=1, le=MOST_CORES, description="CPU cores of one worker, at least.")
    memory: str | None = Field(
        default=None, description='Memory of one worker, at least ("32GB"; GB = 10⁹ bytes, GiB = 2³⁰).'
    )
    architecture: Architecture | None = Field(
        default=None, description='Processor of the machines, "x86_64" or "arm64"; None: any.'
    )
    volume: tuple[Volume, ...] = Field(default=(), description="Volumes mounted on every node.")
    spot: AnySpot | None = Field(
        default=None, description="Spot strategy; None: spot where it is sold, on demand elsewhere."
    )
    timeout: float = Field(
        default=3600,
        gt=0,
        le=LONGEST_SECONDS,
        description="Auto-shutdown: seconds without a running call after which the pool ends itself.",
    )
    max_lifetime: float | None = Field(
        default=None, gt=0, le=LONGEST_SECONDS, description="Hard limit of the pool's life, in seconds."
    )
    lease_seconds: float = Field(
        default=120,
        ge=5,
        le=LONGEST_SECONDS,
        description="Seconds without a sign of life from a client after which a node ends itself.",
    )
    retries: int = Field(
        default=3,
        ge=0,
        le=MOST_RETRIES,
        description="How often a call runs again when its node is lost under it; 0: never twice.",
    )
    max_cost: float | None = Field(
        default=None, gt=0, le=MOST_USD, description="Hard limit of the pool's cost, in USD."
    )
    max_hourly_cost: float | None = Field(
        default=None,
        gt=0,
        le=MOST_USD,
        description="The most that all machines of the pool together may cost, in USD per hour.",
    )
    max_price_ratio: float = Field(
        default=4.0,
        ge=1,
        le=MOST_RATIO,
        description="Without max_hourly_cost: how many times the price of the first candidate another one may cost.",
    )
    budget: str | None = Field(
        default=None,
        min_length=1,
        description="Account of the ledger that pays; all pools that name it share its limit.",
    )
    env: Mapping[str, str] | None = Field(
        default=None, description="Environment variables of the calls, as plain text."
    )
    secrets: Secrets | None = Field(
        default=None,
        description=(
            "Environment variables of the calls whose values are read when the pool opens: names, or references by"
            " name."
        ),
    )
    concurrency: int = Field(default=1, ge=1, le=MOST_SLOTS, description="Calls that one worker runs at once.")
    provision_timeout: float = Field(
        default=1800, gt=0, le=LONGEST_SECONDS, description="Seconds within which the machines must be ready."
    )
    display: Display = Field(default="log", description='What is printed: "log", "spinner" or "quiet".')
    output: Output = Field(
        default="all",
        description='Of which nodes the output of a broadcast is shown: "all", or only the first one\'s, "head".',
    )
    collect_metrics: bool = Field(
        default=True, description="Sample processor, memory and GPUs of each node every two seconds."
    )
    name: PoolName | None = Field(
        default=None,
        description="Processes that open a pool with the same name and settings share it; None: a pool of one process.",
    )
    keep_warm: float = Field(
        default=0.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="Seconds for which a pool with a name stays when no process uses it any more.",
    )
    scale_up_after: float = Field(
        default=30.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="Seconds for which calls wait for a slot before a pool of nodes=(least, most) grows.",
    )
    scale_down_after: float = Field(
        default=300.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="Seconds without a call after which a pool of nodes=(least, most) shrinks.",
    )

    @classmethod
    def of(cls, **keywords: Unpack[PoolKeywords]) -> Self:
        """Build a spec from keywords; raises BadRequest, which says what to do.

        Strings and numbers may stand for values: `accelerator="A100"`, `spot=0.8`.
        """
        fields: dict[str, Any] = {**keywords}
        if isinstance(fields.get("volume"), BaseModel):
            fields["volume"] = (fields["volume"],)
        if fields.get("volume", ()) is None:
            del fields["volume"]
        try:
            return cls(**fields)
        except ValidationError as error:
            raise BadRequest(explained(error, fields, cls, unshown=UNREPEATED)) from None

    def with_(self, **changes: Unpack[PoolKeywords]) -> Self:
        """Return a spec with these fields changed, validated again."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set}
        fields.update(cast("dict[str, Any]", changes))
        return type(self).of(**fields)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        known, data = cls.model_fields, _with_pip_in_the_image(data)
        unknown = (
            [name for name in cast("Mapping[str, Any]", data) if name not in known] if isinstance(data, Mapping) else []
        )
        if unknown:
            raise ValueError("; ".join(_unknown(name, list(known)) for name in unknown))
        return without_booleans(cls, data)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.memory is not None:
            memory_gb(self.memory)
        if self.env:
            refuse_unexportable(self.env)  # as in the image's
        for field in ("scale_up_after", "scale_down_after"):
            if not isinstance(self.nodes, tuple) and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field} is for a pool that grows: write nodes=(least, most), as in nodes=(1, 8)")
        if self.secrets and (both := sorted(self.secrets.keys() & ((self.env or {}).keys() | self.image.env.keys()))):
            raise ValueError(f"{', '.join(both)} stands in env and in secrets: leave it out of env")
        return self

    @field_validator("env")
    @classmethod
    def _frozen(cls, env: Mapping[str, str] | None) -> Mapping[str, str] | None:
        return None if env is None else FrozenEnv(env)

    @field_serializer("env", when_used="json")
    def _without_secrets(self, env: Mapping[str, str] | None) -> dict[str, str] | None:
        return None if env is None else masked(env)

    @property
    def providers(self) -> tuple[Provider, ...]:
        """The providers that may rent the machines; empty if the settings decide."""
        return self.provider if isinstance(self.provider, tuple) else () if self.provider is None else (self.provider,)

    @property
    def requirements(self) -> Requirements:
        """The hardware requirements, for one machine with all its workers; of several alternatives the first ones."""
        memory = memory_gb(self.memory) if self.memory is not None else None
        return Requirements(
            accelerator=self.first_accelerator,
            instance_type=self.machine,
            vcpus=self.cpu * self.workers_per_node if self.cpu is not None else None,
            memory_gb=memory * self.workers_per_node if memory is not None else None,
            architecture=self.architecture,
            nodes=self.most_nodes,
            min_cuda=self.image.min_cuda,
        )

    @property
    def least_nodes(self) -> int:
        """How many machines the pool opens with, and shrinks to."""
        return self.nodes[0] if isinstance(self.nodes, tuple) else self.nodes

    @property
    def most_nodes(self) -> int:
        """How many machines the pool may have at once."""
        return self.nodes[1] if isinstance(self.nodes, tuple) else self.nodes

    @property
    def is_elastic(self) -> bool:
        """Whether the number of machines may change while the pool is open."""
        return self.most_nodes > self.least_nodes

    def may_cost(self, usd_per_hour: float) -> bool:
        """Return whether all machines of the pool together may cost so much (`max_hourly_cost`)."""
        # sums of prices differ from the number that a user writes in their last binary digit
        return self.max_hourly_cost is None or usd_per_hour <= self.max_hourly_cost * (1 + 1e-9)

    @property
    def workers_per_node(self) -> int:
        """How many workers one machine holds: one for each MIG partition of its GPUs, or one."""
        return _workers_on(self.first_accelerator)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The accelerators that the pool may have, if they are several; it has one of them when it is open."""
        return self.accelerator if isinstance(self.accelerator, tuple) else ()

    @property
    def first_accelerator(self) -> Accelerator | None:
        """The accelerators of one machine; of several alternatives the first ones."""
        return self.accelerator[0].accelerator if isinstance(self.accelerator, tuple) else self.accelerator

    @property
    def accelerator_words(self) -> str:
        """The accelerators of one machine, with all alternatives, for messages; "" without any."""
        return ", else ".join(map(str, self.alternatives)) or str(self.accelerator or "")

    def each_alternative(self) -> tuple[Self, ...]:
        """Return the spec with each of its alternatives as its accelerator, in their order; else only itself."""
        return tuple(self.with_(accelerator=one.accelerator) for one in self.alternatives) or (self,)

    def accelerator_on(self, offer: Offer) -> Accelerator | None:
        """Return the accelerators that calls on this machine may use: those of the spec, or all of the machine."""
        if self.accelerator is not None or offer.accelerator is None:
            return self.first_accelerator
        chip = find(offer.accelerator)
        choices = chip.memory_choices(None)
        offered_gb = offer.accelerator_memory_gb or choices[0]
        # clouds report GiB for GB, and omit reserved memory
        nearest = min(choices, key=lambda gb: abs(gb - offered_gb))
        return Accelerator(chip.name, nearest, offer.accelerators)

    @property
    def neuron_cores(self) -> tuple[tuple[int, ...], ...]:
        """The NeuronCores of each call that runs at once on a machine; empty if it has none, or the runtime chooses.

        Raises BadRequest if there are too few.
        """
        return self.neuron_cores_of(self.first_accelerator)

    def neuron_cores_of(self, accelerator: Accelerator | None) -> tuple[tuple[int, ...], ...]:
        """The same on a machine with calls that may use these accelerators (`accelerator_on`)."""
        return slot_cores(accelerator, self.node_environment, self.concurrency)

    @property
    def node_environment(self) -> dict[str, str]:
        """Environment variables of the calls: the image's, then the pool's.

        Raises BadRequest for one that is masked.
        """
        refuse_masks(self.image.env, "the image's env")
        refuse_masks(self.env or {}, "env")
        return {**dict(self.image.env), **(self.env or {})}

    @property
    def plain_secrets(self) -> list[str]:
        """Names of probable secrets in the environment of the calls; they belong in `secrets`."""
        return [
            name for name, value in {**dict(self.image.env), **(self.env or {})}.items() if looks_secret(name, value)
        ]

    def refuse_written_credentials(self, place: str, instead: str) -> None:
        """Raise BadRequest for secrets that stand on a provider, where the spec is about to become plain data.

        That has none: the pool would be rented with other credentials, if there are some.

        `place` names that data; `instead` says what to write, with {kind} for the provider's class and {field} for the
        first of the fields.
        """
        for provider in self.providers:
            if fields := provider.written_credentials:
                advice = instead.format(kind=type(provider).__name__, field=fields[0])
                raise BadRequest(
                    f"{', '.join(fields)} of provider {provider.name!r} cannot be kept in {place}: {advice}"
                )

    def refuse_keep_warm_without_a_name(self) -> None:
        """Raise BadRequest. Called when the pool is made: the name may come later, from an option or the settings."""
        if self.keep_warm and self.name is None:
            raise BadRequest("keep_warm needs a name, by which the next process finds the pool: name=...")

    def refuse_what_cannot_be(self) -> None:
        """Raise BadRequest for values that would fail only after machines have been paid for."""
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if self.image.python != here:
            raise BadRequest(
                f"the image wants Python {self.image.python} and this is {here}: functions travel pickled by value,"
                " which needs the same minor version on both "
                f"sides. Run this program with Python {self.image.python}, or leave Image(python=...) out (it is then"
                f' "{here}")'
            )
        self.image.refuse_changed_files()
        refuse_overlaps(self.volume)
        for spec in self.each_alternative():
            _ = spec.neuron_cores  # raises


def signature(*own: inspect.Parameter) -> inspect.Signature:
    """Return the signature of a callable that has its own parameters and the keywords of `PoolKeywords`."""
    fields = PoolSpec.model_fields
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=fields[name].get_default(call_default_factory=True) if name in fields else (),
            annotation=hint,
        )
        for name, hint in get_type_hints(PoolKeywords).items()
    ]
    return inspect.Signature([*own, *keywords])


def _loaded(given: Any) -> Provider | tuple[Provider, ...]:
    """Read one provider or several; BadRequest is a ValueError, which pydantic reports as the field's error."""
    found = base.load_all(given)
    return next(iter(found)) if len(found) == 1 else found


def _accelerators(given: Any) -> Accelerator | tuple[Alternative, ...]:
    """Read an accelerator, or a list of alternatives. Raises BadRequest, which is the field's error for pydantic."""
    if isinstance(given, Mapping):
        return Accelerator.from_json(cast("Mapping[str, Any]", given))
    if isinstance(given, Alternative):
        raise BadRequest("an alternative stands in a list: accelerator=[...]")
    if not isinstance(given, list | tuple):
        return accelerators.parse(given)
    found = tuple(Alternative.read(one) for one in cast("Sequence[Any]", given))
    if not found:
        raise BadRequest("an empty list of accelerators: name one, or leave it out")
    if len(set(found)) < len(found):
        raise BadRequest("the same accelerator is named twice")
    workers = {_workers_on(one.accelerator) for one in found}
    if len(workers) > 1:
        numbers = ", ".join(f"{one}: {_workers_on(one.accelerator)}" for one in found)
        raise BadRequest(
            f"the alternatives make different numbers of workers of one machine ({numbers}): write partitions (mig=...)"
            " that make equally many"
        )
    return found


def _workers_on(accelerator: Accelerator | None) -> int:
    return accelerator.count * len(accelerator.mig) if accelerator is not None and accelerator.mig else 1


def _with_pip_in_the_image(given: Any) -> Any:
    """Add `pip` to the packages of the image: pip=[...] is short for image=Image(pip=[...]). Raises BadRequest."""
    if not isinstance(given, Mapping) or "pip" not in given:
        return given
    fields = dict(cast("Mapping[str, Any]", given))
    more, image = Image(pip=fields.pop("pip")).pip, fields.get("image", Image())
    if isinstance(image, Mapping):
        image = Image(**cast("Mapping[str, Any]", image))
    if isinstance(image, Image):  # else pydantic says what is wrong with it
        its: dict[str, Any] = {name: getattr(image, name) for name in image.model_fields_set}
        its["pip"] = (*image.pip, *more)
        image = Image(**its)
    return {**fields, "image": image}


def _node_count(given: Any) -> int | tuple[int, int]:
    """Read a number of machines or the least and the most. Raises ValueError, which says what to write."""
    if isinstance(given, list | tuple):
        sizes = cast("Sequence[Any]", given)
        if len(sizes) != 2 or not all(type(size) is int for size in sizes):
            raise ValueError(
                f"nodes={shown(given)}: write the least and the most number of machines, as in nodes=(1, 8)"
            )
        least, most = sizes
        if max(sizes) > MOST_NODES:
            raise ValueError(_too_many(max(sizes)))
        if least < 1:
            raise ValueError(
                f"nodes={shown(given)}: a pool keeps at least 1 machine, so write nodes=(1, {max(1, most)})"
            )
        if most < least:
            raise ValueError(f"nodes={shown(given)}: the least number comes first, so write nodes=({most}, {least})")
        return (least, most)
    is_read = isinstance(given, str) and given.isascii() and given.isdecimal()
    number = whole_of_digits(given) if is_read else given
    if isinstance(number, int) and number > MOST_NODES:
        raise ValueError(_too_many(number))
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(
            f"nodes={shown(given)}: write how many machines, at least 1, or the least and the most, as in nodes=(1, 8)"
        )
    return number


def pool_name(given: Any) -> Any:
    """Return the name under which the ledger has a pool: `given` itself, if it has up to 128 letters, digits and
    characters of `._:/@+~=,|-`, and begins with a letter or a digit.

    Else each other character becomes "-", and eight hexadecimal digits of its SHA-256 follow, so that two names stay
    two. Raises ValueError for a name without letters and digits, and for control characters.
    """
    if not isinstance(given, str):
        return given  # pydantic tells what is wrong
    if not given.isprintable() or not any(character.isalnum() for character in given):
        raise ValueError(f"name={given!r}: write letters and digits, as in name='nightly'")
    if len(given) <= NAME_CHARACTERS and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@+~=,|-]*", given):
        return given
    fit = re.sub(r"[^A-Za-z0-9._:/@+~=,|-]", "-", given)
    digest = hashlib.sha256(given.encode()).hexdigest()[:8]
    return f"{fit.lstrip('._:/@+~=,|-')[: NAME_CHARACTERS - 9] or 'pool'}-{digest}"


def _too_many(number: int) -> str:
    shown = str(number) if number < 10**MOST_DIGITS else "a longer number"
    return (
        f"nodes={shown}: a pool has at most {MOST_NODES:,} machines, because one scheduler serves them all; open"
        " several pools"
    )


def _plain(providers: Provider | tuple[Provider, ...]) -> Any:
    return [one.to_json() for one in providers] if isinstance(providers, tuple) else providers.to_json()


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in OTHER_NAMES:
        return f"there is no {name!r} of a pool: it is {OTHER_NAMES[name]}"
    if name in Image.model_fields:
        return f"there is no {name!r} of a pool, it is its image's: write image=Image({name}=...)"
    return f"there is no {name!r}; {question(name, known) or 'known are: ' + ', '.join(known)}"
