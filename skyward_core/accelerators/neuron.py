"""NeuronCores: the cores that a node's calls may use, and their division among calls that run at the same time.

AWS's runtime gives a core to one process until that process ends. By default a process takes all cores of the machine,
so a second call would find none. So the cores are divided into rows, one for each slot of a worker. Each runner process
gets its cores in `NEURON_RT_VISIBLE_CORES`. Cores are numbered through the machine, from 0 to chips x cores of a chip -
1. The user's environment has precedence over the catalogue: `NEURON_RT_VISIBLE_CORES` has the cores to divide,
`NEURON_RT_NUM_CORES` leaves the choice to the runtime, and `NEURON_LOGICAL_NC_CONFIG` is how many cores of a Trainium2
count as one.

Sources: AWS Neuron documentation 2.33, "Neuron Runtime configuration" (NeuronCore allocation) and "Logical NeuronCore
configuration", 2026-11. That logical cores, and not physical ones, are numbered is from its tutorials ("0-63" on a
trn2.48xlarge).
"""

import re
from collections.abc import Mapping

from skyward_core.accelerators import Accelerator
from skyward_core.accelerators.catalog import Chip, find
from skyward_core.errors import BadRequest
from skyward_core.written_numbers import whole_of_digits

LAST_CORE = 9999
VISIBLE, NUMBER = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
LOGICAL = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
"""The variable for the number of physical cores that count as one, and its older name."""


def slot_cores(
    accelerator: Accelerator | None, environment: Mapping[str, str], slots: int
) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each slot of a worker with this accelerator.

    The result is empty without NeuronCores, or if the runtime chooses. `environment` is that of the calls. Raises
    BadRequest if there are fewer cores than slots, or if a variable of Neuron is malformed.

    >>> slot_cores(Accelerator("Trainium1", 32, 2), {}, 2)
    ((0, 1), (2, 3))
    """
    chip = find(accelerator.name) if accelerator is not None else None
    if accelerator is None or chip is None or not chip.neuron_cores:
        return ()
    given = environment.get(VISIBLE)
    if given is None and NUMBER in environment:
        return ()
    cores = _read(given) if given is not None else tuple(range(accelerator.count * _cores_of(chip, environment)))
    if len(cores) < slots:
        raise BadRequest(
            f"concurrency={slots}, and {accelerator if given is None else given} has {len(cores)}"
            f" NeuronCore{'s' if len(cores) > 1 else ''}: a core belongs to "
            f"one process, and each call that runs at once is one. Write concurrency={len(cores)} or less, ask for more"
            " chips, or let the runtime choose for "
            f'the calls that want a core: env={{"{NUMBER}": "1"}}'
        )
    return tuple(cores[slot * len(cores) // slots : (slot + 1) * len(cores) // slots] for slot in range(slots))


def _cores_of(chip: Chip, environment: Mapping[str, str]) -> int:
    """Return how many cores of a chip have numbers."""
    together = chip.neuron_cores_in_one
    name = next((name for name in LOGICAL if name in environment), None)
    if together > 1 and name is not None:  # other chips have no logical cores
        if environment[name] not in ("1", "2"):
            raise BadRequest(
                f'{name}={environment[name]!r}: write "1" (each of the {chip.neuron_cores} cores of a {chip.name}'
                ' alone) or "2" (two are one)'
            )
        together = int(environment[name])
    return chip.neuron_cores // together


def _read(text: str) -> tuple[int, ...]:
    """Return the cores of a text such as "0-3,6"; a range includes both ends."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        first, last = (0, -1) if match is None else map(whole_of_digits, (match[1], match[2] or match[1]))
        if last < first or last > LAST_CORE:
            raise BadRequest(
                f'{VISIBLE}={text!r} names no NeuronCores: write numbers and ranges of them, "0-3" or "0,2,4-5", or'
                " leave it out for all"
            )
        cores.extend(range(first, last + 1))
    if len(set(cores)) < len(cores):
        raise BadRequest(f"{VISIBLE}={text!r} names a NeuronCore twice")
    return tuple(cores)
