"""No message shows a password or a token of a URL, whatever has put the URL into it."""

import traceback

import pytest

import skyward_core as sky
from skyward_core.errors import BootstrapFailed, CallCrashed, CommandFailed, shown_unread, without_logins
from skyward_core.providers._http import Api
from skyward_core.providers.base import load


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no URL: a@b, c:d@e", "no URL: a@b, c:d@e"),
        ("https://host/a?b=c#d", "https://host/a?b=c#d"),
        ("git+https://host/repo@main", "git+https://host/repo@main"),
        ("https://jo:pw@host/simple", "https://***@host/simple"),
        ("HTTP://jo:pw@proxy:3128", "HTTP://***@proxy:3128"),
        ("git+https://ghp_1@github.com/o/r@main", "git+https://***@github.com/o/r@main"),
        ("https://__token__:p@w/1@host", "https://***@host"),
        ("('http://:pw@proxy', 'x')", "('http://***@proxy', 'x')"),
        ("postgresql+psycopg://jo:p/w#?@host:1/db", "postgresql+psycopg://jo:***@host:1/db"),
        ("postgresql://jo:***@host", "postgresql://jo:***@host"),
        ("ssh://git@host/r", "ssh://git@host/r"),
        ("redis://:pw@host", "redis://:***@host"),
        ("socks5h://jo:pw@h and https://k@h", "socks5h://jo:***@h and https://***@h"),
        ("postgresql://h/db?sslmode=x&password=pw&a=b", "postgresql://h/db?sslmode=x&password=***&a=b"),
        ("https://h/o?X-Amz-Signature=1a&X-Amz-Date=2", "https://h/o?X-Amz-Signature=***&X-Amz-Date=2"),
    ],
)
def test_passwords_and_tokens_are_hidden(text: str, shown: str) -> None:
    assert without_logins(text) == shown
    assert without_logins(shown) == shown


@pytest.mark.parametrize("text", ["a" * 1_000_000 + "://", "://" * 300_000, "https://" + "a:" * 500_000])
def test_a_long_text_takes_no_time(text: str) -> None:
    """The search is linear: the output of a command is such a text."""
    assert without_logins(text) == text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ledger.db", "ledger.db"),
        ("sqlite:/x y.db", "sqlite:/x y.db"),
        ("postgresql://jo:pw/db", "postgresql://***"),
        ("host=h password=pw", "***"),
    ],
)
def test_what_cannot_be_read_shows_no_part_that_may_be_a_password(url: str, shown: str) -> None:
    assert shown_unread(url) == shown


INDEX, NO_PORT, FTP = "https://jo:hunter2@host/simple", "https://jo:hunter2", "ftp://jo:hunter2@host"


def in_full(error: BaseException) -> str:
    """Return all that a log shows of an error: its causes, attributes and representation too."""
    return "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))


@pytest.mark.parametrize(
    "raise_it",
    [
        lambda: sky.Image(pip=[f"--index-url {INDEX}"]),
        lambda: sky.Image(pip_extra_index_url=FTP),
        lambda: sky.Image(pip_indexes={INDEX: ("a",)}),
        lambda: sky.AWS(endpoint_url=INDEX),
        lambda: load({"name": "aws", "endpoint_url": INDEX, "checkip_url": 5}),
        lambda: load({"name": "aws", "region": INDEX, "use_ssm": "no bool"}),
        lambda: sky.DigitalOcean(endpoint_url=INDEX),
        lambda: sky.PoolSpec.of(machine=INDEX, nodes=0),
        lambda: sky.S3Volume(bucket="b", mount_path="/m", endpoint_url=INDEX),
        lambda: Api("Acme", NO_PORT),
    ],
)
def test_no_refusal_of_a_setting_repeats_a_password(raise_it: object) -> None:
    assert callable(raise_it)
    with pytest.raises(sky.BadRequest) as caught:
        raise_it()
    assert "hunter2" not in in_full(caught.value)


def test_a_proxy_that_is_no_url_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", NO_PORT)
    with pytest.raises(sky.BadRequest, match="HTTPS_PROXY") as caught:
        Api("Acme", "https://host")
    assert "hunter2" not in in_full(caught.value)


def test_errors_show_no_password_whoever_raises_them() -> None:
    words = f"fatal: unable to access {INDEX}"
    errors = [
        sky.SkywardError(words),
        sky.BadRequest(words),
        BootstrapFailed(words, output=[words]),
        CommandFailed(words, 1, words),
        CallCrashed(words, output=[words]),
    ]
    for error in errors:
        assert "fatal: unable to access https://***@host/simple" in str(error)
        assert "hunter2" not in in_full(error)
