"""A node without any orchestrator: `image=BARE` gives it an environment of its own.

Without packages, a local node runs the client's interpreter, which has Airflow, Prefect and Dagster. A value of theirs
that cannot travel to a rented machine is not noticed there.
"""

import skyward_core as sky

BARE = sky.Image(pip=["six==1.17.0"])


def importable() -> list[str]:
    """Return which of these modules this interpreter has."""
    from importlib.util import find_spec

    return [name for name in ("airflow", "dagster", "pendulum", "prefect", "pydantic", "six") if find_spec(name)]
