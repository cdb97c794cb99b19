"""Results of tasks: in XCom while they are small, else in a file at a place that the user names.

from airflow_provider_skyward.results import read_result

weights = read_result(path)  # `path` is the XCom of a task with result_path=
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast
from urllib.parse import quote

import cloudpickle
from airflow.sdk import ObjectStoragePath
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowFailException

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import xcom_class

DONE = "The work is done and paid for: it is not tried again"
_DEEPEST = 30
_ADVICE = (
    "give result_path= a folder or a bucket, write it to storage on the node and return its path, or set [core]"
    " xcom_backend to one that stores in files"
)


def refuse_place(place: str) -> None:
    """Raise BadRequest for a place where no file can be written, before anything is rented.

    A local folder is made. Of object storage, scheme and connection are checked, and nothing is written.
    """
    try:
        folder = ObjectStoragePath(place)
        if "file" in folder.fs.protocol:
            folder.mkdir(parents=True, exist_ok=True)
    except Exception as error:
        raise sky.BadRequest(f"result_path={place!r} is no place for a result: {error}") from error


def write_result(value: Any, place: str, work: sky.Work) -> str:
    """Write a result as a pickle, in a file that this try alone has; return its path.

    Raises AirflowFailException, because another try would pay for the same work again.
    """
    names = (work.workflow, work.run, work.task, f"{work.task_run or 'result'}-{work.attempt}.pickle")
    path = "/".join([place.rstrip("/"), *(quote(str(name), safe="+:@=,") for name in names)])
    try:
        file = ObjectStoragePath(path)
        if "file" in file.fs.protocol:
            file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            stream.write(cloudpickle.dumps(value))
    except Exception as error:
        raise AirflowFailException(f"the result could not be written to {path}: {error!r}. {DONE}") from error
    return path


def read_result(path: str) -> Any:
    """Return the result that a task with `result_path` has written. It is a pickle: read only what your tasks wrote."""
    with ObjectStoragePath(path).open("rb") as stream:
        return cloudpickle.load(cast("IO[bytes]", stream))


def refuse_what_airflow_refuses(result: object, task: Any, task_instance: Any, limit: int | None) -> None:
    """Raise AirflowFailException for a result that Airflow would refuse after `execute`, when it tries the task again:
    the work is done, and another try would pay for it again.
    """
    value = result if task.do_xcom_push else None
    is_mapped = getattr(task_instance, "is_mapped", False)
    if task.has_dag() and not is_mapped and next(iter(task.iter_mapped_dependants()), None) is not None:
        _refuse_unmappable(value)
    if value is None:
        return
    if task.multiple_outputs:
        _refuse_as_outputs(value)
    if xcom_class().serialize_value is BaseXCom.serialize_value:  # another backend has its own limits
        _refuse_as_json(value, limit)


def _refuse_unmappable(value: object) -> None:
    # imported only when a task runs: parsing a DAG does not need it
    from airflow.sdk.definitions.mappedoperator import is_mappable_value

    if not is_mappable_value(value):
        raise AirflowFailException(
            f"the result is a {type(value).__name__}, and a task downstream is mapped over it: return a list or a"
            f" dictionary (and leave do_xcom_push on, and result_path out). {DONE}"
        )


def _refuse_as_outputs(value: object) -> None:
    if not isinstance(value, Mapping):
        raise AirflowFailException(
            f"the result is a {type(value).__name__}, and multiple_outputs wants a dictionary, of which each item is an"
            f" XCom: return one, or set multiple_outputs=False. {DONE}"
        )
    items = cast("Mapping[Any, Any]", value)
    if wrong := next((key for key in items if not isinstance(key, str)), None):
        raise AirflowFailException(
            f"the result has the key {wrong!r}, a {type(wrong).__name__}, and each key of multiple_outputs is the name"
            f" of an XCom, a string. It is set by the annotation `-> dict`: use strings, or set multiple_outputs=False."
            f" {DONE}"
        )


def _refuse_as_json(value: object, limit: int | None) -> None:
    from airflow.sdk.serde import serialize

    try:
        size = len(json.dumps(serialize(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        number = next(_not_finite("result", value, 0), "")
        why = f"{number} is no number in JSON: return None in its place" if number else str(error)
        raise AirflowFailException(
            f"the result, a {type(value).__name__}, is nothing that XCom can store ({why}): {_ADVICE}. {DONE}"
        ) from error
    if limit is not None and size > limit:
        raise AirflowFailException(
            f"the result takes {size:,} bytes as XCom, more than {limit:,} (max_xcom_bytes): {_ADVICE}. {DONE}"
        )


def _not_finite(path: str, value: Any, depth: int) -> Iterator[str]:
    """Find NaN and infinity: the API server refuses them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}={value}"
    elif depth < _DEEPEST and isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _not_finite(f"{path}[{key!r}]", item, depth + 1)
    elif depth < _DEEPEST and isinstance(value, (list, tuple)):
        for i, item in enumerate(cast("list[Any]", value)):
            yield from _not_finite(f"{path}[{i}]", item, depth + 1)
