"""MIG (Multi-Instance GPU): the profiles into which a chip can be split, how many fit, and which sets fit together.

A chip has memory slices in a row: 8 if it has 7 compute slices, else as many as compute slices. A profile takes `width`
of them from one of its `starts`, and no slice belongs to two profiles. `nvidia-smi mig -lgipp` prints the same
placements.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skyward_core.accelerators.catalog import find, nearest
from skyward_core.errors import BadRequest

CHANGED_BY_RESET = ("A100", "A30")
"""Ampere chips, which need a reset of the GPU to change to MIG mode; later chips do not (fact sheet of 2026-11-20,
section 7.4).
"""

RESET_MAY_BE_REFUSED = (
    "an A100 or A30 changes to MIG mode with a reset of the GPU, which a virtual machine may not allow: then the pool"
    " fails after its machines were prepared and billed. H100, H200 and B200 need no reset"
)
"""NVIDIA: "VM reboot is required" if passthrough hides the reset (NVML, nvmlDeviceSetMigMode).

A rented machine does not return after a reboot.
"""


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One kind of partition: `slices` are compute slices, `width` memory slices; `memory_gb` is as in the name."""

    name: str
    count_that_fit: int
    memory_gb: int
    slices: int
    width: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    chip: str
    memory_gb: int
    profiles: tuple[MigProfile, ...]
    source: str


class _Partitioned(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def mig(self) -> tuple[str, ...]: ...


def profiles(name: str, memory_gb: int) -> tuple[MigProfile, ...]:
    """Return the profiles of a chip with that much memory, smallest first; none without MIG.

    >>> [(profile.name, profile.count_that_fit) for profile in profiles("A100", 40)][-2:]
    [('4g.20gb', 1), ('7g.40gb', 1)]
    """
    chip = find(name).name
    return next((table.profiles for table in TABLES if (table.chip, table.memory_gb) == (chip, memory_gb)), ())


def check(name: str, memory_gb: int, wanted: Sequence[str]) -> None:
    """Raise BadRequest, with the valid choices, unless one GPU can hold these profiles all at once."""
    name = find(name).name
    known = {profile.name: profile for profile in profiles(name, memory_gb)}
    if not known:
        raise BadRequest(_no_mig(name, memory_gb))
    for profile in wanted:
        if profile not in known:
            raise BadRequest(_no_profile(profile, name, memory_gb, tuple(known)))
    chosen = sorted((known[profile] for profile in wanted), key=_largest_first)
    if not _fits(chosen) or not _media_fit(wanted):
        raise BadRequest(
            f"one {name} {memory_gb}GB cannot hold {_counted(wanted)} at once; {_counted(_what_fits(chosen))} would"
            f" fit. Alone fit: {', '.join(f'{profile.count_that_fit} x {profile.name}' for profile in known.values())}"
        )


def split(name: str, memory_gb: int, requested: str | Iterable[str]) -> tuple[str, ...]:
    """Return the partitions of one GPU, largest first: in that order the driver can place all of them.

    A single name means as many as fit, a collection of names exactly those. Raises BadRequest as `check` does.

    >>> split("H100", 80, "3g.40gb")
    ('3g.40gb', '3g.40gb')
    >>> split("H100", 80, ["1g.10gb", "4g.40gb"])
    ('4g.40gb', '1g.10gb')
    """
    wanted = (requested,) if isinstance(requested, str) else tuple(requested)
    if not wanted:
        return ()
    check(name, memory_gb, wanted)
    known = {profile.name: profile for profile in profiles(name, memory_gb)}
    if isinstance(requested, str):
        return (requested,) * known[requested].count_that_fit
    return tuple(profile.name for profile in sorted((known[each] for each in wanted), key=_largest_first))


def needs_reset(accelerator: _Partitioned) -> bool:
    """Return whether a GPU needs a reset, or its machine a reboot, for the partitions of this accelerator."""
    return bool(accelerator.mig) and accelerator.name in CHANGED_BY_RESET


def partitions(accelerator: _Partitioned) -> tuple[str, ...]:
    """Return the partitions of each GPU of this accelerator, in the order of creation; none if the GPU stays whole.

    Each partition gets a worker. `Accelerator` has expanded single names: `H100(mig="3g.40gb")` has two partitions,
    `H100(mig=["3g.40gb"])` has one.
    """
    return accelerator.mig


def _fits(chosen: Sequence[MigProfile], taken: int = 0) -> bool:
    """Return whether there is a place for each profile; `taken` has a bit for each used memory slice."""
    if not chosen:
        return True
    first, *rest = chosen
    places = (((1 << first.width) - 1) << start for start in first.starts)
    return any(not taken & place and _fits(rest, taken | place) for place in places)


def _media_fit(wanted: Sequence[str]) -> bool:
    """Return whether the media engines suffice: one `+me` for each GPU, and with `+me.all` only `-me` partitions.

    From the user guide's columns of hardware units: one OFA for the whole GPU, and `+me.all` takes every NVDEC.
    """
    with_all = any(profile.endswith("+me.all") for profile in wanted)
    with_media = sum("+me" in profile for profile in wanted)
    return with_media <= 1 and (not with_all or sum(not profile.endswith("-me") for profile in wanted) == 1)


def _what_fits(chosen: Sequence[MigProfile]) -> list[str]:
    """Return those of the profiles that fit together, largest first."""
    kept = list[MigProfile]()
    for profile in chosen:
        if _fits([*kept, profile]) and _media_fit([each.name for each in (*kept, profile)]):
            kept.append(profile)
    return [profile.name for profile in kept]


def _largest_first(profile: MigProfile) -> tuple[int, int, str]:
    return (-profile.slices, -profile.width, profile.name)


def _counted(names: Sequence[str]) -> str:
    return " + ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _no_mig(name: str, memory_gb: int) -> str:
    sizes = [table.memory_gb for table in TABLES if table.chip == name]
    if sizes:
        return (
            f"MIG profiles of the {name} are known for {' and '.join(f'{size}GB' for size in sizes)}, not for"
            f" {memory_gb}GB"
        )
    return (
        f"{name} has no MIG; leave `mig` out, or choose a chip that has it:"
        f" {', '.join(dict.fromkeys(table.chip for table in TABLES))}"
    )


def _no_profile(profile: str, name: str, memory_gb: int, known: tuple[str, ...]) -> str:
    other = next(
        (
            table.memory_gb
            for table in TABLES
            if table.chip == name and any(each.name == profile for each in table.profiles)
        ),
        None,
    )
    why = f"it is one of the {name} {other}GB" if other else f"the nearest is {nearest(profile, known, 1)[0]!r}"
    return f"{name} {memory_gb}GB has no MIG profile {profile!r}: {why}. Valid are: {', '.join(known)}"


def _seven(names: str) -> tuple[MigProfile, ...]:
    """Return the profiles of a chip with 7 compute and 8 memory slices.

    `names` have the order of the user guide: 1g, 1g+me, 1g of double memory, 2g, 3g, 4g, 7g. Places are those of
    `nvidia-smi mig -lgipp`, the same on A100 and H100 (user guide, "Getting Started with MIG").
    """
    everywhere = tuple(range(7))
    shapes = (
        (7, 1, everywhere),
        (1, 1, everywhere),
        (4, 2, (0, 2, 4, 6)),
        (3, 2, (0, 2, 4)),
        (2, 4, (0, 4)),
        (1, 4, (0,)),
        (1, 8, (0,)),
    )
    return tuple(
        _profile(name, count, width, starts) for name, (count, width, starts) in zip(names.split(), shapes, strict=True)
    )


def _even(total: int, names: str) -> tuple[MigProfile, ...]:
    """Return the profiles of a chip with `total` compute slices and as many memory slices.

    A profile begins at multiples of its own size.
    """
    sizes = {name: int(name.partition("g")[0]) for name in names.split()}
    return tuple(
        _profile(name, 1 if "+me" in name else total // size, size, tuple(range(0, total, size)))
        for name, size in sizes.items()
    )


def _profile(name: str, count: int, width: int, starts: tuple[int, ...]) -> MigProfile:
    slices, memory_gb = re.findall(r"\d+(?=g)", name)[:2]
    return MigProfile(name, count, int(memory_gb), int(slices), width, starts)


_GUIDE = (
    "NVIDIA MIG User Guide, Supported MIG Profiles,"
    " docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html, 2026-11"
)
_PARTED = "NVIDIA/mig-parted, deployments/systemd/config-default.yaml, 2026-11"
_OPERATOR = (
    "NVIDIA GPU Operator release notes 25.10.0 and default-mig-parted-config; fact sheet of 2026-11-20, section 7.2"
)
_EIGHTY = _seven("1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb")

TABLES: tuple[_Table, ...] = (
    _Table("A100", 40, _seven("1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"), _GUIDE),
    _Table("A100", 80, _EIGHTY, _GUIDE),
    _Table("H100", 80, _EIGHTY, _GUIDE),
    _Table("H100", 94, _seven("1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb"), _GUIDE),
    _Table("GH200", 96, _seven("1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb"), _GUIDE),
    _Table("GH200", 144, _seven("1g.18gb 1g.18gb+me 1g.36gb 2g.36gb 3g.72gb 4g.72gb 7g.144gb"), _PARTED),
    _Table("H200", 141, _seven("1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"), _GUIDE),
    _Table("B200", 180, _seven("1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"), _GUIDE),
    _Table("GB200", 186, _seven("1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb"), _OPERATOR),
    _Table("GB200", 189, _seven("1g.24gb 1g.24gb+me 1g.47gb 2g.47gb 3g.95gb 4g.95gb 7g.189gb"), _PARTED),
    # 288 GB = 269 GiB: NVIDIA's names for these two use GiB
    _Table("B300", 288, _seven("1g.34gb 1g.34gb+me 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb"), _OPERATOR),
    _Table("GB300", 288, _seven("1g.35gb 1g.35gb+me 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb"), _OPERATOR),
    _Table("A30", 24, _even(4, "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"), _GUIDE),
    _Table(
        "RTX PRO 6000",
        96,
        _even(
            4,
            "1g.24gb 1g.24gb+me 1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 2g.48gb 2g.48gb+gfx 2g.48gb+me.all 2g.48gb-me"
            " 4g.96gb 4g.96gb+gfx",
        ),
        _GUIDE,
    ),
    _Table("RTX PRO 4500", 32, _even(2, "1g.16gb 1g.16gb+gfx 1g.16gb+me.all 1g.16gb-me 2g.32gb 2g.32gb+gfx"), _GUIDE),
)
