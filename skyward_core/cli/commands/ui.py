"""`skyward ui`: one page on this machine with pools, nodes, calls and costs."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import open_ledger
from skyward_core.errors import BadRequest

TOKEN = "SKYWARD_UI_TOKEN"  # noqa: S105 - the name of a variable
SHORTEST_TOKEN = 20
TOKEN_BYTES = 24


def ui(
    context: typer.Context,
    *,
    port: Annotated[
        int, typer.Option(parser=values.port, metavar="PORT", help="on 127.0.0.1; any free one if not given")
    ] = 0,
) -> int:
    """Serve a page on this machine with pools, nodes, calls, costs and refusals until Ctrl-C, and print its URL."""
    from skyward_core.cli.ui.pages import answers
    from skyward_core.cli.ui.server import PageServer
    from skyward_core.cli.ui.utilisation import Utilisation

    token = _token()
    with (
        open_ledger(context) as ledger,
        Utilisation(ledger) as utilisation,
        PageServer(port, token, answers(ledger, utilisation)) as server,
    ):
        print(server.url, flush=True)
        print(
            "skyward: Ctrl-C ends the page; with this URL, every user of this machine can read it",
            file=sys.stderr,
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("skyward: the page has ended; the pools go on", file=sys.stderr, flush=True)
    return 0


def _token() -> str:
    """Return the token of the environment, which a monitor can keep, or a random one.

    It is no option: other users of this machine see the command lines of processes.
    """
    token = os.environ.get(TOKEN)
    if token is None:
        return secrets.token_urlsafe(TOKEN_BYTES)
    if len(token) < SHORTEST_TOKEN or not all(one.isalnum() or one in "-_" for one in token) or not token.isascii():
        raise BadRequest(
            f"{TOKEN} needs at least {SHORTEST_TOKEN} letters, digits, `-` or `_`: make one with `openssl rand -hex 24`"
        )
    return token
