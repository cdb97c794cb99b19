"""The steward of a named pool in the ledger: the one client that replaces nodes and keeps the money.

    no steward ──`take`──▶ client a, epoch n ──`resign`, or `Names.leave`──▶ no steward
                             ├──`close`──▶ a ends the pool: a process that comes waits
                             └──a is dead, or does not renew its row: `take` of another client──▶ client b, epoch n + 1

Writes that only the steward may make name its epoch. The same transaction refuses them when another client has become
the steward (`must_be_steward`). `names_policy.standing` decides; docs/decisions/0028 has the states.
"""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from skyward_core.ledger.database import Database
from skyward_core.ledger.names_policy import NameFacts, NameState, NotSteward, Standing, standing
from skyward_core.ledger.tables import CLIENTS, NAMES, POOLS, client_seen, name_of, pool_of


class Stewards:
    """The stewards of named pools. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        """Use this database."""
        self._database = database

    def look(self, name: str, client_id: str) -> tuple[Standing, int]:
        """Return what a client is to the steward of its pool, and the steward's epoch. It may change at once."""
        with self._database.read() as connection:
            facts = self._facts(connection, name, client_id)
        return standing(facts, client_id), 0 if facts is None else facts.row.epoch

    def take(self, name: str, client_id: str) -> int | None:
        """Make a client the steward, if the pool has none that lives; return its epoch. None: it is not the steward.

        For a client that is the steward already nothing changes.
        """
        with self._database.write() as connection:
            facts = self._facts(connection, name, client_id, is_locked=True)
            found = standing(facts, client_id)
            if facts is None or found not in {Standing.HELD, Standing.VACANT}:
                return None
            if found is Standing.HELD:
                return facts.row.epoch
            epoch = facts.row.epoch + 1
            connection.execute(update(NAMES).where(NAMES.c.name == name).values(steward=client_id, epoch=epoch))
            return epoch

    def close(self, name: str, client_id: str, epoch: int) -> None:
        """Record that the steward of this epoch ends the pool. Processes that open it wait for the end, and then rent
        new machines.

        Raises NotSteward, and changes nothing, if this client is not that steward any more.
        """
        is_its = (NAMES.c.name == name) & (NAMES.c.steward == client_id) & (NAMES.c.epoch == epoch)
        with self._database.write() as connection:
            ending = update(NAMES).where(is_its).values(state=NameState.CLOSING.value)
            if connection.execute(ending).rowcount == 0:
                raise NotSteward(f"another process keeps the pool {name!r} now, and decides about its end")

    def resign(self, name: str, client_id: str, epoch: int) -> None:
        """Let another client become the steward. Changes nothing if this one is not the steward of this epoch."""
        is_its = (NAMES.c.name == name) & (NAMES.c.steward == client_id) & (NAMES.c.epoch == epoch)
        with self._database.write() as connection:
            connection.execute(update(NAMES).where(is_its).values(steward=""))

    def _facts(self, connection: Connection, name: str, client_id: str, *, is_locked: bool = False) -> NameFacts | None:
        """Return what is known of a name, with this client and the steward only; None if the name has no pool.

        The steward's row is locked too: a steward that renews it at this moment waits, and then sees its successor.
        """
        wanted = select(NAMES).where(NAMES.c.name == name)
        row = connection.execute(wanted.with_for_update() if is_locked else wanted).mappings().first()
        if row is None or not row["pool_id"]:
            return None
        named = name_of(row)
        pool = connection.execute(select(POOLS).where(POOLS.c.id == named.pool_id)).mappings().first()
        both = select(CLIENTS).where(CLIENTS.c.id.in_([client_id, named.steward])).order_by(CLIENTS.c.id)
        rows = connection.execute(both.with_for_update() if is_locked else both).mappings()
        clock = self._database.lease_clock()
        clients = [client_seen(client, clock) for client in rows]
        states = {client.owner: client.owner.state() for client in clients}
        now = self._database.now(connection)
        return NameFacts(named, None if pool is None else pool_of(pool), clients, now, states)


def must_be_steward(connection: Connection, pool_id: str, epoch: int | None) -> None:
    """Raise NotSteward if the pool has had another steward after this epoch. None: the pool has no name."""
    if epoch is None:
        return
    now = connection.execute(
        select(NAMES.c.epoch).where(NAMES.c.pool_id == pool_id).with_for_update(read=True)
    ).scalar()
    if now != epoch:
        raise NotSteward(
            f"another process keeps pool {pool_id!r} now: this one was silent for too long. Its calls go on, but it"
            " rents nothing more for the pool"
        )
