"""The connections of an operator, read while its task runs: the ledger, and the credentials of the cloud.

The ledger and the secret key go into the environment of the task's process, because the pool's reaper and the command
that a kill starts inherit it. Credentials are in no environment, no spec, no ledger and no serialized DAG.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from airflow.sdk import BaseHook

import skyward_core as sky
from airflow_provider_skyward.hooks import SkywardHook, provider_of


@contextmanager
def ledger_of(conn_id: str | None) -> Generator[None]:
    """Have this process use the ledger and the secret key of a connection, in the block. None changes nothing."""
    variables = SkywardHook(conn_id).get_conn() if conn_id else {}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def credentials_of(conn_id: str | None, provider: object) -> sky.Provider | None:
    """Return the provider with the credentials of a connection, and the other settings of the spec's provider.

    None without a connection. Raises BadRequest for several providers, and for one of another cloud.
    """
    if not conn_id:
        return None
    if isinstance(provider, tuple):
        raise sky.BadRequest("provider_conn_id is for one provider: name one, or leave the connection out")
    given = provider if isinstance(provider, sky.Provider) else None
    return provider_of(conn_id, BaseHook.get_connection(conn_id), given)


async def ledger_of_triggerer(conn_id: str | None) -> None:
    """Have the triggerer use the ledger of a connection from now on: all its triggers share one environment.

    Raises BadRequest if it uses another ledger, or another secret key.
    """
    if not conn_id:
        return
    for name, value in SkywardHook.variables_of(await BaseHook.aget_connection(conn_id)).items():
        if os.environ.setdefault(name, value) != value:
            raise sky.BadRequest(
                f"{name} of the connection {conn_id!r} is not that of this triggerer, which follows calls of one ledger"
                " only: a worker follows the call"
            )


async def ledger_url_in_triggerer(conn_id: str | None) -> str | None:
    """Return the ledger of a connection; None without a connection."""
    if not conn_id:
        return None
    return SkywardHook.variables_of(await BaseHook.aget_connection(conn_id)).get("SKYWARD_LEDGER")


async def credentials_in_triggerer(conn_id: str | None, provider: dict[str, Any] | None) -> sky.Provider | None:
    """As `credentials_of`, for the plain data of a provider."""
    if not conn_id:
        return None
    given = sky.PoolSpec.of(provider=provider).providers if provider else ()
    return provider_of(conn_id, await BaseHook.aget_connection(conn_id), given[0] if given else None)
