"""Links of a task instance in Airflow's UI, from renting on: our tab, the bill as JSON, and the cloud's own page.

The UI reads a link from an XCom. Airflow writes it when a task ends or is deferred, so the attempt pushes it earlier.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode, urljoin

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import xcom_class

PAGE_KEY, RECEIPT_KEY, CONSOLE_KEY = "skyward_page", "skyward_receipt", "skyward_console"
"""The keys of the XComs. Each is in the serialized form of each task, so they are short."""


class _StoredLink(BaseOperatorLink):
    """A link that the attempt has pushed."""

    label = ""
    key = ""

    @property
    def name(self) -> str:
        """The words on the button."""
        return self.label

    @property
    def xcom_key(self) -> str:
        """The XCom that holds the link."""
        return self.key

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the link: that of the attempt, or that in XCom if this process only fetches a result; "" for none."""
        if operator.links is not None:
            known = operator.links.get(self.key)
        else:
            known = xcom_class().get_value(ti_key=ti_key, key=self.key)
        return str(known or "")


class SkywardLink(_StoredLink):
    """The tab "Skyward" of the task instance: cost, machines and tries."""

    label = "Skyward"
    key = PAGE_KEY


class ReceiptLink(_StoredLink):
    """The receipts of the task's pools, as JSON."""

    label = "Receipt"
    key = RECEIPT_KEY


class ConsoleLink(_StoredLink):
    """The page of the cloud's console that shows the first machine; no link if the provider has no such page."""

    label = "Cloud console"
    key = CONSOLE_KEY


def links_of(work: sky.Work) -> dict[str, str]:
    """Return the links of a task instance that are known before a machine is."""
    base = conf.get("api", "base_url", fallback="/").rstrip("/") + "/"
    dag, run, task = (quote(part, safe=":+@") for part in (work.workflow, work.run, work.task))
    mapped = f"/mapped/{work.task_run}" if work.task_run else ""
    query = {"run_id": work.run, "task_id": work.task} | ({"map_index": work.task_run} if work.task_run else {})
    return {
        PAGE_KEY: urljoin(base, f"dags/{dag}/runs/{run}/tasks/{task}{mapped}/plugin/skyward"),
        RECEIPT_KEY: urljoin(base, f"skyward/dags/{dag}/task?{urlencode(query)}"),
    }
