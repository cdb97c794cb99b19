"""`prefect_context=True`: what a pool needs so that calls have Prefect's context, and what travels with each of them
(docs/decisions/0038-prefect-s-context-on-nodes.md).

The API's address is a variable of the pool; if the pool has a name, of each call, so that programs beside Prefect can
share it. The keys are secrets of the pool: the spec has their names, and their values are read when it opens. With a
call travels what describes its runs, as plain text.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import logging
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefect.context import FlowRunContext, TagsContext, TaskRunContext
from prefect.settings import get_current_settings

import skyward_core as sky

ADDRESS = "PREFECT_API_URL"
NO_API_SCHEME = "skyward-node:"
NO_API = f"{NO_API_SCHEME}//a-node-has-no-way-to-prefects-api"
RUN_LOGGERS = ("prefect.task_runs", "prefect.flow_runs")
_KEYS = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_CLIENT_CUSTOM_HEADERS")
_NODE_SIDE = Path(__file__).with_name("node_context.py")
_IS_PREFECT = re.compile(r"\s*prefect(-[a-z0-9-]+)?\s*(\[[^]]*\])?\s*($|[=<>!~@; ])", re.IGNORECASE)


def with_prefect_s_api(spec: sky.PoolSpec) -> sky.PoolSpec:
    """Return the spec of a pool whose calls reach this process's API: with its address, and the names of its keys.

    Raises BadRequest if nodes would have no Prefect, or if this process has no API that they could reach.
    """
    whole = with_settings(spec)
    refuse_without_prefect(whole)
    own = whole.secrets or {}
    env, secrets = dict(whole.env or {}), {name: sky.Secret.from_env(name) for name in _values()}
    if not _has_address(whole):
        address = _address(whole)
        if urlsplit(address).username:
            secrets[ADDRESS] = sky.Secret.from_env(ADDRESS)
        elif whole.name is None:
            env[ADDRESS] = address
    changes: dict[str, Any] = {"env": env} if env else {}
    if secrets:
        changes["secrets"] = {**secrets, **own}
    return spec.with_(**changes)


def without_prefect_s_api(spec: sky.PoolSpec) -> sky.PoolSpec:
    """Give nodes an address at which each use of Prefect's API fails at once; an address of the user has precedence.

    Without an address Prefect's client starts a server on the node, with a database in the home directory. If it may
    not do that, its concurrency limits wait for ever (3.6 to 3.7).
    """
    if spec.name is not None:
        return spec
    whole = with_settings(spec)  # a spec with an `env` takes none from the settings of this machine
    return spec.with_(env={ADDRESS: NO_API, **whole.image.env, **(whole.env or {})})


def env_of_calls(spec: sky.PoolSpec, *, in_prefect_s_context: bool) -> dict[str, str]:
    """Return what calls on a pool with a name have in place of the pool's own address of the API. Raises BadRequest."""
    if spec.name is None or _has_address(whole := with_settings(spec)):
        return {}
    return {ADDRESS: _address(whole) if in_prefect_s_context else NO_API}


def keys_of_prefect(spec: sky.PoolSpec) -> dict[str, str]:
    """Return the values of the secrets that `with_prefect_s_api` has named, from this process's settings."""
    known = _values() | ({ADDRESS: address} if (address := get_current_settings().api.url) else {})
    return {
        name: known[name]
        for name, reference in (spec.secrets or {}).items()
        if name in known and reference == sky.Secret.from_env(name)
    }


def refuse_without_prefect(spec: sky.PoolSpec) -> None:
    """Raise BadRequest if it can be known that the nodes have no Prefect."""
    if (spec.image.is_bare and _is_local(spec)) or _installs_prefect(spec.image):
        return
    found = version("prefect")
    raise sky.BadRequest(
        "prefect_context=True needs Prefect on the nodes, and the image does not install it:"
        f' image=sky.Image(pip=["prefect=={found}", ...])'
    )


def in_prefect_s_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for nodes. It takes the facts of a call, its arguments and its keywords, and makes the call in
    Prefect's context.
    """
    source, file = _node_side()
    needed = version("prefect")

    def on_node(facts: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import json
        import linecache
        import sys
        import types
        from importlib.metadata import PackageNotFoundError, version

        name = "skyward_prefect_node"
        module = sys.modules.get(name)
        if module is None or module.__dict__["source"] != source:
            try:
                found = version("prefect")
            except PackageNotFoundError:
                found = ""
            if found.split(".")[:2] != needed.split(".")[:2]:
                raise sky.BadRequest(
                    f"prefect_context=True: the flow has Prefect {needed}, and the node has"
                    f' {found or "none"}: image=sky.Image(pip=["prefect=={needed}", ...])'
                )
            module = types.ModuleType(name)
            module.__dict__.update(source=source, __file__=file)
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            sys.modules[name] = module
            try:
                exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - the text of our own file
            except BaseException:
                del sys.modules[name]
                raise
        return module.__dict__["run"](fn, json.loads(facts), args, kwargs)

    on_node.__module__ = "skyward_node"  # no such module, here or there: so the function travels by value
    on_node.__name__ = on_node.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    on_node.__dict__.update(getattr(fn, "__dict__", {}))  # for instance that its workers form a group
    return on_node


def facts_of_call() -> str:
    """Return what describes the runs of this thread, as JSON."""
    flow, task, tags = FlowRunContext.get(), TaskRunContext.get(), TagsContext.get()
    run = flow.flow_run if flow is not None else None
    facts: dict[str, Any] = {
        "tags": sorted(tags.current_tags),
        "flow_run": "",
        "task_run": "",
        "result_storage": _block_id(flow or task),
        "log_levels": {name: logging.getLogger(name).getEffectiveLevel() for name in RUN_LOGGERS},
    }
    if flow is not None and run is not None:
        facts |= {
            "flow_run": run.model_dump_json(exclude={"state": {"data"}}),
            "flow_name": flow.flow.name if flow.flow is not None else "",
            "flow_version": flow.flow.version if flow.flow is not None else None,
            "flow_persists": flow.persist_result,
            "flow_log_prints": flow.log_prints,
        }
    if task is not None:
        facts |= {
            "task_run": task.task_run.model_dump_json(exclude={"state": {"data"}}),
            "task_run_id": str(task.task_run.id),
            "task_name": task.task.name,
            "task_version": task.task.version,
            "task_tags": sorted(task.task.tags),
            "task_key": task.task.task_key,
            "task_persists": task.persist_result,
            "task_log_prints": task.log_prints,
        }
    return json.dumps(facts)


def with_settings(spec: sky.PoolSpec) -> sky.PoolSpec:
    """Return the spec with the fields that the nodes' environment depends on; this machine's settings complete them."""
    fields = sky.Settings.read().fields
    missing: dict[str, Any] = {
        name: fields[name]
        for name in ("provider", "image", "env", "secrets")
        if name in fields and (name not in spec.model_fields_set or getattr(spec, name) is None)
    }
    return spec.with_(**missing) if missing else spec


@functools.cache
def _node_side() -> tuple[str, str]:
    return _NODE_SIDE.read_text(encoding="utf-8"), str(_NODE_SIDE)


def _values() -> dict[str, str]:
    """The keys of this process's API, by the names of their variables."""
    settings = get_current_settings()
    key, login, headers = settings.api.key, settings.api.auth_string, settings.client.custom_headers
    values = (
        key.get_secret_value() if key is not None else "",
        login.get_secret_value() if login is not None else "",
        json.dumps(headers) if headers else "",
    )
    return {name: value for name, value in zip(_KEYS, values, strict=True) if value}


def _has_address(spec: sky.PoolSpec) -> bool:
    return ADDRESS in {*(spec.env or {}), *spec.image.env, *(spec.secrets or {})}


def _address(spec: sky.PoolSpec) -> str:
    address, flow = get_current_settings().api.url, FlowRunContext.get()
    if not address and flow is not None:
        address = str(flow.client.api_url).rstrip("/")  # of the temporary server of this flow
    if not address:
        raise sky.BadRequest(
            "prefect_context=True outside of a flow: this process has no PREFECT_API_URL. Start a server (prefect"
            " server start) and set it"
        )
    if not _is_local(spec) and _is_loopback(urlsplit(address).hostname or ""):
        raise sky.BadRequest(
            f"prefect_context=True: {address} is an address of this machine only, and the nodes are other machines. Set"
            " PREFECT_API_URL to one that they reach, for the nodes alone with env={'PREFECT_API_URL': ...}"
        )
    return address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local(spec: sky.PoolSpec) -> bool:
    """Whether all nodes are processes of this machine; without a provider they are."""
    return all(provider.is_local for provider in spec.providers)


def _installs_prefect(image: sky.Image) -> bool:
    return any(_IS_PREFECT.match(line) for line in (*image.pip, *(image.lock or "").splitlines()))


def _block_id(context: FlowRunContext | TaskRunContext | None) -> str:
    found = context.result_store.result_storage_block_id if context is not None else None
    return str(found) if found is not None else ""
