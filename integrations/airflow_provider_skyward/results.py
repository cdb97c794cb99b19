"""Results of tasks: in XCom while they are small, else in a file at a place that the user names.

from airflow_provider_skyward.results import read_result

weights = read_result(path)  # `path` is the XCom of a task with result_path=
"""

from __future__ import annotations

import json
from typing import IO, Any, cast
from urllib.parse import quote

import cloudpickle
from airflow.sdk import ObjectStoragePath
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowFailException

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import xcom_class

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
        raise AirflowFailException(f"the result could not be written to {path}: {error!r}: not tried again") from error
    return path


def read_result(path: str) -> Any:
    """Return the result that a task with `result_path` has written. It is a pickle: read only what your tasks wrote."""
    with ObjectStoragePath(path).open("rb") as stream:
        return cloudpickle.load(cast("IO[bytes]", stream))


def refuse_too_large(result: object, limit: int | None) -> None:
    """Raise AirflowFailException (a retry would only cost again) for a result that XCom cannot take.

    A custom backend has its own limits.
    """
    # imported only when a task runs: parsing a DAG does not need it
    from airflow.sdk.serde import serialize

    if xcom_class().serialize_value is not BaseXCom.serialize_value:
        return
    try:
        size = len(json.dumps(serialize(result)))
    except (TypeError, ValueError, RecursionError) as error:
        raise AirflowFailException(
            f"the result, a {type(result).__name__}, is nothing that XCom can store ({error}): {_ADVICE}"
        ) from error
    if limit is not None and size > limit:
        raise AirflowFailException(
            f"the result takes {size:,} bytes as XCom, more than {limit:,} (max_xcom_bytes): {_ADVICE}"
        )
