"""`output="head"`: of a broadcast, displays and task logs show what the first of its nodes prints.

The events still have the lines of all nodes. Those of the others have `is_shown=False`, except log records of WARNING
and above. Lines on stderr without a level, as those of `warnings.warn`, are not shown.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from skyward_core.events.events import LogLine, SkywardEvent


def hide_other_nodes(event: SkywardEvent, /) -> SkywardEvent:
    """Return the event; a line of another node of a broadcast is not to be shown. The first callback of a pool."""
    if isinstance(event, LogLine) and event.place and (event.level or 0) < logging.WARNING:
        return replace(event, is_shown=False)
    return event
