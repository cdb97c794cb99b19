"""When the pools of a resource begin and end, and which processes share them (docs/decisions/0034)."""

import difflib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dagster as dg
from pydantic import Field

import skyward_core as sky
from dagster_skyward.configuration import refuse_credentials, refuse_plain_secrets, with_references
from dagster_skyward.metadata import StepContext, asset_tags_of, tags_of

CREATE = ("lazy", "eager")
CLEANUP = ("always", "on_exception", "never")
SHARING = ("step", "run", "backfill", "deployment")
"""What `sharing` may be; any other text is the name of a pool."""
NO_NAMES = ("", "job", "asset", "process", "none", "always", "never", "true", "false")
"""What one might take for a word that `sharing` knows."""
OF_RUNS = ("run", "backfill")
"""Those for which the resource names the pool, and the last step that needs it releases it."""
RUN_KEEP_WARM_SECONDS = 300.0
PREFIX = "skyward/"
CONFIG_TAG = f"{PREFIX}config"
OF_A_NAME = ("name", "keep_warm")
OF_A_CALL = (
    "provider",
    "accelerator",
    "selection",
    "nodes",
    "machine",
    "cpu",
    "memory",
    "architecture",
    "spot",
    "max_cost",
    "max_hourly_cost",
)
"""Settings that a call may give, beside its function's own keywords."""


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


def named_by_sharing(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a resource with `sharing="NAME"` written as sharing="deployment" and name="NAME".

    Raises BadRequest if they do not fit together, and for a name that looks like a mistake.
    """
    sharing = keywords.get("sharing")
    if sharing is None or sharing in SHARING:
        _refuse_name_beside(sharing, keywords.get("name"))
        return dict(keywords)
    if not isinstance(sharing, str) or (not isinstance(sharing, dg.EnvVar) and _is_mistaken(sharing)):
        known = ", ".join(map(repr, SHARING))
        raise sky.BadRequest(f'sharing={sharing!r}: write one of {known}, or the name of a pool, such as "team-gpu"')
    if keywords.get("name") is not None:
        raise sky.BadRequest(f"sharing={sharing!r} is the name of a pool, and so is `name`: leave out one of the two")
    return {**keywords, "sharing": "deployment", "name": sharing}


def _is_mistaken(sharing: str) -> bool:
    return sharing in NO_NAMES or bool(difflib.get_close_matches(sharing.lower(), SHARING, 1, 0.75))


def _refuse_name_beside(sharing: object, name: object) -> None:
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

    Raises BadRequest, also for a tag of ours that means nothing.
    """
    refuse_unknown_tags(tags)
    if (text := tags.get(CONFIG_TAG)) is None:
        return spec
    keywords = _config_of(text)
    _refuse_plain_secrets_in_tag(keywords)
    try:
        return changed_spec(spec, keywords)
    except sky.BadRequest as error:
        raise sky.BadRequest(f"the tag {CONFIG_TAG}: {error}") from error


def spec_of_use(spec: sky.PoolSpec, context: StepContext | None, settings: Mapping[str, Any]) -> sky.PoolSpec:
    """Return the spec of one use of a pool: that of its step, with the settings of the call.

    Raises BadRequest, also for settings that no call can give.
    """
    if context is not None:
        refuse_unknown_tags(asset_tags_of(context), known=())
        spec = spec_of_step(spec, tags_of(context))
    for name in settings:
        if name not in OF_A_CALL:
            raise sky.BadRequest(
                f"{name}=...: a call may give its pool {', '.join(OF_A_CALL)}; write other settings on the resource, or"
                f" in the tag {CONFIG_TAG} of the step"
            )
    return changed_spec(spec, settings) if settings else spec


def changed_spec(spec: sky.PoolSpec, keywords: Mapping[str, Any]) -> sky.PoolSpec:
    """Return the spec with these fields.

    A name belongs to one set of settings: a spec that differs has no name, unless the keywords give one. Raises
    BadRequest.
    """
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


def refuse_unknown_tags(tags: Iterable[str], known: tuple[str, ...] = (CONFIG_TAG,)) -> None:
    """Raise BadRequest for a tag of an op or an asset that looks like ours, and would be ignored."""
    unknown = sorted(name for name in tags if name.startswith(PREFIX) and name not in known)
    if unknown:
        raise sky.BadRequest(
            f"the tag {unknown[0]} is ignored there: the settings of a step are one tag of its op,"
            f' op_tags={{"{CONFIG_TAG}": {{"nodes": 2}}}}'
        )


def divided_keywords(fn: Callable[..., Any], keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the keywords of a call into those of its function and those of its pool (OF_A_CALL).

    A parameter of the function is the function's, whatever its name. Raises BadRequest if the function takes any
    keywords, because then it could be meant for either.
    """
    settings = {name: keywords[name] for name in OF_A_CALL if name in keywords}
    if not settings:
        return dict(keywords), {}
    parameters = _parameters(fn)
    settings = {name: value for name, value in settings.items() if name not in parameters}
    takes_any = next((one.name for one in parameters.values() if one.kind is one.VAR_KEYWORD), None)
    if settings and takes_any is not None:
        name = next(iter(settings))
        raise sky.BadRequest(
            f"{name}=...: the function takes any keywords (**{takes_any}), so that this may be meant for it or for its"
            f" pool. For the function write functools.partial(fn, {name}=...); for the pool `with compute.pool(context,"
            f" {name}=...) as pool: pool.run(sky.compute(fn)(...))`"
        )
    return {name: value for name, value in keywords.items() if name not in settings}, settings


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):  # of C
        return {}


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
