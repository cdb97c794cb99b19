"""When the pools of a resource begin and end, and which processes share them (docs/decisions/0034)."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

import skyward_core as sky
from dagster_skyward.configuration import refuse_credentials, refuse_plain_secrets, with_references

CREATE = ("lazy", "eager")
CLEANUP = ("always", "on_exception", "never")
SHARING = ("step", "run", "backfill", "deployment")
OF_RUNS = ("run", "backfill")
"""Those for which the resource names the pool, and the last step that needs it releases it."""
RUN_KEEP_WARM_SECONDS = 300.0
CONFIG_TAG = "skyward/config"
OF_A_NAME = ("name", "keep_warm")


class Lifecycle(dg.Config):
    """When the pools of a resource open, and when they end.

    A run that is terminated ends its pools in any case.
    """

    create: str = Field(
        default="lazy", description='"lazy": a pool opens when a step first uses it; "eager": before its first step.'
    )
    cleanup: str = Field(
        default="always",
        description=(
            'When the machines end with the resource: "always", "on_exception" (only after a failed step) or "never".'
            " Otherwise they stay for `timeout` seconds, or `keep_warm` seconds if they are shared."
        ),
    )
    keep_on_failure: float = Field(
        default=0.0, description="Seconds for which the machines stay after a failed step; 0: they end."
    )

    def __init__(self, **keywords: Any) -> None:
        """Raise BadRequest for values that mean nothing."""
        super().__init__(**keywords)
        for name, known in (("create", CREATE), ("cleanup", CLEANUP)):
            _refuse_unknown(f"lifecycle.{name}", getattr(self, name), known)
        if self.keep_on_failure < 0:
            raise sky.BadRequest(f"lifecycle.keep_on_failure={self.keep_on_failure:g}: write seconds, at least 0")

    def kept_seconds(self, usual_seconds: float, *, has_failed: bool) -> float:
        """Return for how many seconds the machines stay without the resource; 0: they end with it."""
        if has_failed and self.keep_on_failure:
            return self.keep_on_failure
        is_kept = self.cleanup == "never" or (self.cleanup == "on_exception" and not has_failed)
        return usual_seconds if is_kept else 0.0


def refuse_sharing(sharing: object, keywords: Mapping[str, Any]) -> None:
    """Raise BadRequest if these keywords do not fit to who shares the pools."""
    _refuse_unknown("sharing", sharing, SHARING)
    name = keywords.get("name")
    if sharing in OF_RUNS and name is not None:
        raise sky.BadRequest(f'name={name!r}: sharing="{sharing}" makes the name itself; leave out one of the two')
    if sharing == "deployment" and name is None:
        raise sky.BadRequest('sharing="deployment" needs a name, by which other runs find the pool: name=...')


def spec_of_run(spec: sky.PoolSpec, group: str, keep_warm: float, keep_on_failure: float) -> sky.PoolSpec:
    """Return the spec with the name that all steps of a group of runs give it (`backfills.group_of`).

    Other settings give another name. `keep_warm` is in seconds; 0: the default.
    """
    settings = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:12]
    warm = max(keep_warm or RUN_KEEP_WARM_SECONDS, keep_on_failure)
    return spec.with_(name=f"dagster/{group}/{settings}", keep_warm=warm)


def spec_of_step(spec: sky.PoolSpec, tags: Mapping[str, str]) -> sky.PoolSpec:
    """Return the spec of a step: the tag `skyward/config` replaces fields of the resource's.

    A name belongs to one set of settings: a spec that differs has no name, unless the tag gives one. Raises BadRequest.
    """
    if (text := tags.get(CONFIG_TAG)) is None:
        return spec
    keywords = _config_of(text)
    _refuse_plain_secrets_in_tag(keywords)
    changed = spec.with_(**with_references(keywords))
    if "provider" in keywords:
        refuse_credentials(changed)
    if changed == spec:
        return spec
    if spec.name is not None and "name" not in keywords:
        left = {name: getattr(changed, name) for name in changed.model_fields_set if name not in OF_A_NAME}
        changed = sky.PoolSpec.of(**left)
    changed.refuse_what_cannot_be()
    return changed


def _refuse_plain_secrets_in_tag(keywords: Mapping[str, Any]) -> None:
    """Raise BadRequest: a tag is JSON and holds no `EnvVar`, but a name of a variable."""
    try:
        refuse_plain_secrets(keywords)
    except sky.BadRequest as error:
        raise sky.BadRequest(
            f'the tag {CONFIG_TAG}: {error}. In a tag write "secrets": {{"NAME": {{"env": "NAME"}}}}, and replace the'
            " secret: Dagster has stored it with the tag"
        ) from error


def _config_of(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise sky.BadRequest(
            f"the tag {CONFIG_TAG}={text!r} is no mapping of settings: write"
            f' @dg.asset(op_tags={{"{CONFIG_TAG}": {{"nodes": 2}}}})'
        )
    return {str(name): value for name, value in found.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _refuse_unknown(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise sky.BadRequest(f"{name}={value!r}: write one of {', '.join(map(repr, known))}")
