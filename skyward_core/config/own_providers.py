"""Which provider a row of the ledger leads to. This is the only place that decides it (docs/decisions/0052).

Many may write to a ledger. So a row says which of this process's providers has the machines, and nothing more: no
address that gets credentials, no host to log in to, no file whose commands run. The steps, the first that fits:

    the same provider is given, or in the settings ──▶ that one, with its credentials; the row's harmless fields hold
    the row sets harmless fields only              ──▶ its kind, with these fields
    the row is signed with a key of this process   ──▶ the provider in the row
    one that leads to the same machines is given,
    or in the settings                             ──▶ that one, with the row's harmless fields
    the row leads nowhere: it sets only what each
    process decides for itself                     ──▶ its kind, with the row's harmless fields
    else                                           ──▶ refused, in words that say what to do

No step takes another provider in place of a refused one: its listing lacks the machines, and that would read as their
end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skyward_core.config.settings import Settings
from skyward_core.errors import BadRequest, CredentialsError, LeaseTampered
from skyward_core.ledger.rows import PoolEntry
from skyward_core.machines.instances import Lease
from skyward_core.machines.signing import Signed, proven_provider, verify
from skyward_core.providers.base import Provider, kind_of, load, load_all, sensitive_fields

SHOWN_CHARACTERS = 200
CURE = (
    "If it is yours, name it in the settings of this process (SKYWARD_PROVIDER, or `provider` in skyward.toml), or with"
    """ --provider '{"name": ...}' of `skyward sweep` and `skyward stop`; or give this process and the one that opens"""
    " pools the same SKYWARD_SECRET_KEY"
)
_log = logging.getLogger("skyward")


class OwnProviders:
    """The providers that this process's user has named: those given to a call, and those of the settings."""

    def __init__(self, given: Sequence[Provider] = ()) -> None:
        self._given = tuple(given)
        self._configured: dict[str, tuple[Provider, ...]] = {}
        """Those of the settings, by the name of the pool: a table of `skyward.toml` may be for one."""

    def of(self, entry: PoolEntry) -> Provider:
        """Return the provider that has the machines of a pool. Sends no request.

        Raises CredentialsError if the row leads to a place that neither this user nor a signature names; it is
        LeaseTampered if the row was altered. Raises BadRequest for a provider that is not known here.
        """
        known = [*self._given, *self._from_settings(entry)]
        ours = [provider for provider in known if provider.name == entry.written_provider.get("name")]
        if named := same_as(entry, ours, but=frozenset()):
            return named[0]
        if (equal := _equal(entry, ours)) is not None:
            return equal
        kind = kind_of_pool(entry)
        others = sensitive_fields(entry.written_provider, kind)
        if not others and not entry.provider_signature:
            return _with_harmless(entry, kind)
        signed = proven_provider(entry.id, entry.written_provider, entry.provider_signature)
        if signed is Signed.VALID:
            return load(entry.written_provider)
        if (equal := _equal(entry, ours, but=_own(kind))) is not None:
            return equal
        leading = _without(others, _own(kind))
        if leading or not others or signed is Signed.ALTERED:  # without others: somebody has removed what was signed
            raise _refusal(entry, leading or others, signed)
        words = "the provider of pool %r %s in the ledger: %s of this process, or the default, is used instead"
        _log.info(words, entry.id, signed, ", ".join(sorted(others)))
        return _with_harmless(entry, kind)

    def _from_settings(self, entry: PoolEntry) -> tuple[Provider, ...]:
        if kind_is_local(entry):  # this computer needs neither credentials nor settings
            return ()
        if entry.name not in self._configured:
            try:
                named = Settings.read(pool=entry.name or None).fields.get("provider")
                self._configured[entry.name] = load_all(named) if named else ()
            except BadRequest as error:  # settings that a pool needs, and a look does not
                _log.debug("the settings name no provider: %s", error)
                self._configured[entry.name] = ()
        return self._configured[entry.name]


def provider_of(entry: PoolEntry, given: Sequence[Provider] = ()) -> Provider:
    """Return the provider that has the machines of a pool; `given` are those that the caller's user has named.

    Raises as `OwnProviders.of`.
    """
    return OwnProviders(given).of(entry)


def provider_of_lease(lease: Lease, *, is_sealed: bool = False) -> Provider:
    """Return the provider of a lease that is signed by this user, or was sealed. Raises CredentialsError for others."""
    if not is_sealed:
        verify(lease, asks_provider=True)
    return load(lease.provider)


def kind_of_pool(entry: PoolEntry) -> type[Provider]:
    """Return the class of a pool's provider, which has its billing rules. Raises BadRequest if it is not known here."""
    return kind_of(str(entry.written_provider.get("name", "")))


def kind_is_local(entry: PoolEntry) -> bool:
    """Whether the machines of a pool are processes of a computer."""
    return entry.written_provider.get("name") == "local"


def same_as(entry: PoolEntry, providers: Iterable[Provider], *, but: frozenset[str] | None = None) -> list[Provider]:
    """Return those of these providers which equal a pool's row, except for some fields: by default those that each
    process decides for itself. The equal ones go first.
    """
    row = dict(entry.written_provider)
    ours = [provider for provider in providers if provider.name == row.get("name")]
    exact = [provider for provider in ours if provider.to_json() == row]
    return exact or [
        provider
        for provider in ours
        if _without(provider.to_json(), own := _own(type(provider)) if but is None else but) == _without(row, own)
    ]


def _equal(entry: PoolEntry, providers: Iterable[Provider], *, but: frozenset[str] = frozenset()) -> Provider | None:
    """Return the first of these providers that sets the same as a row, except for harmless fields, which are the row's,
    and for some others, which are its own.
    """
    for provider in providers:
        kind = type(provider)
        here, there = (sensitive_fields(fields, kind) for fields in (provider.to_json(), entry.written_provider))
        if _without(here, but) == _without(there, but):
            return _with_harmless(entry, kind, provider)
    return None


def _own(kind: type[Provider]) -> frozenset[str]:
    """Return the fields that each process decides for itself."""
    return kind.own_fields | kind.of_one_computer


def _without(fields: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _with_harmless(entry: PoolEntry, kind: type[Provider], provider: Provider | None = None) -> Provider:
    """Return a provider of this kind with the harmless fields of a row, and all others of `provider`."""
    row = {name: value for name, value in entry.written_provider.items() if name in kind.harmless_fields}
    kept: dict[str, Any] = {}
    if provider is not None:
        if {name: value for name, value in provider.to_json().items() if name in kind.harmless_fields} == row:
            return provider
        kept = {name: getattr(provider, name) for name in provider.model_fields_set - kind.harmless_fields}
    try:
        return kind(**kept, **row)
    except BadRequest as error:
        raise BadRequest(f"the provider of pool {entry.id!r} in the ledger cannot be used: {error}") from error


def _refusal(entry: PoolEntry, fields: dict[str, Any], signed: Signed) -> CredentialsError:
    """Return the error of a row that may lead to a place of its writer. Its values are shown so that none acts."""
    shown = ", ".join(f"{ascii(name)[1:-1]}={_shown(value)}" for name, value in fields.items())
    words = (
        f"the ledger says that the machines of pool {entry.id!r} are at {entry.provider_name}"
        f"{f' with {shown}' if shown else ''}, and that row {signed}: it was not used. {CURE}"
    )
    return LeaseTampered(words) if signed is Signed.ALTERED else CredentialsError(words)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
