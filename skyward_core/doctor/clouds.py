"""The checks of one provider: credentials, the listing that a sweep needs, and quotas. None of them rents anything."""

from __future__ import annotations

import time

from skyward_core.doctor.check import Check
from skyward_core.errors import CredentialsError, SkywardError
from skyward_core.providers.base import Provider


def check_cloud(provider: Provider) -> list[Check]:
    """Check whether the provider accepts our credentials, and lists our machines."""
    subject = f"provider {provider.name}"
    try:
        began = time.monotonic()
        account = provider.account()
        seconds = time.monotonic() - began
        machines = provider.instances()
    except SkywardError as error:
        return [Check.failed(subject, error.without_advice, error.advice or _cure(error))]
    except (OSError, ImportError) as error:
        return [Check.failed(subject, f"{type(error).__name__}: {error}", _cure(error))]
    whose = f"account {account}, answered in {seconds:.1f} s" if account else "needs no account"
    count = f"{len(machines)} machine{'' if len(machines) == 1 else 's'} of pools"
    return [Check.ok(subject, f"{whose}; {count}"), *_quotas(provider, subject)]


def _cure(error: Exception) -> str:
    if isinstance(error, CredentialsError):
        return "set other credentials, as docs/clouds says for this provider, or give these the missing rights"
    if isinstance(error, ImportError):
        return "install the package that is missing, as the page of this provider says (docs/clouds)"
    return "look whether this machine reaches the provider, and at its status page"


def _quotas(provider: Provider, subject: str) -> list[Check]:
    subject = f"{subject}: quota"
    try:
        quotas = provider.quotas()
    except SkywardError as error:
        cure = "nothing, if pools open; else give the credentials the right to read quotas"
        return [Check.warning(subject, f"not known: {error}", cure)]
    return [
        Check.ok(subject, f"{name}: {value:g}")
        if value > 0
        else Check.warning(subject, f"{name}: {value:g}", "ask the provider for more, or add credit")
        for name, value in quotas.items()
    ]
