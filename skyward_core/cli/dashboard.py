"""The server of `skyward dashboard`: pages of a pool's Dask scheduler, for the browser of one user of this machine.

It is the server of `skyward ui`, but the token is the first part of the path, because the links of Dask's pages are
relative to the page. What a node sends is a text of HTML for which the browser runs no script of the node. Scripts and
images come from the Dask of this machine, and the style sheet from where Dask has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, override
from urllib.parse import parse_qsl, urlsplit

from skyward_core.cli.ui import ADDRESS, Answer, PageServer

if TYPE_CHECKING:
    from skyward_core.live.observer import Observer

START = "/info/main/workers.html"
PAGES, STATICS = "/pages", "/statics/"
"""Dask's pages look for its files three folders above them, which are two deep."""
HTML = "text/html; charset=utf-8"
BULMA = "https://cdnjs.cloudflare.com/ajax/libs/bulma/"
"""Where Dask's pages have their style sheet from. Without it they are plain."""
POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline' {BULMA}; img-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MEDIA_TYPES = {
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
}


class DaskPages:
    """What answers a path: a page of the node, or a file of this machine's Dask."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def get(self, path: str) -> Callable[[Mapping[str, str]], Answer] | None:
        """Return what answers a path, without its token; None for one that is no page."""
        if path.startswith(f"{PAGES}/info/"):
            return lambda _: self._page(path.removeprefix(PAGES))
        file = self._statics.get(path.removeprefix(STATICS)) if path.startswith(STATICS) else None
        if file is None:
            return None
        media_type = MEDIA_TYPES[path.rpartition(".")[2]]
        return lambda _: Answer(file.read_bytes(), media_type)

    def _page(self, path: str) -> Answer:
        page = self._observer.dask_page(path)
        return Answer(page.text.encode(errors="replace"), HTML, {"Content-Security-Policy": POLICY}, page.status)

    @cached_property
    def _statics(self) -> Mapping[str, Traversable]:
        folders = [one for one in files("distributed.http").joinpath("static").iterdir() if one.is_dir()]
        return {
            f"{folder.name}/{file.name}": file
            for folder in folders
            for file in folder.iterdir()
            if file.name.rpartition(".")[2] in MEDIA_TYPES
        }


class DaskServer(PageServer):
    """Listens on 127.0.0.1 for requests whose path begins with the token."""

    command = "skyward dashboard"

    @property
    @override
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}{PAGES}{START}"

    @override
    def read_target(self, target: str) -> tuple[str, str | None, dict[str, str]]:
        url = urlsplit(target)
        token, _, path = url.path.removeprefix("/").partition("/")
        return f"/{path}", token, dict(parse_qsl(url.query))
