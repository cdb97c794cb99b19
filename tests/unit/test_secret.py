"""`secrets=`: the spec has references, the processes of calls have the values in memory, and nothing that is written
has them.
"""

import html
import json
import logging
import os
import pickle
import shlex
import traceback
from base64 import b64encode, urlsafe_b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import skyward_core as sky
from skyward_core.secret import LARGEST_BYTES, looks_secret, read_values
from skyward_core.serialization.exceptions import MESSAGE_CHARACTERS, unpack
from skyward_core.worker.masking import MASK, Mask, SecretValues
from skyward_core.worker.runner import Packet, _failed
from skyward_core.worker.runner_factory import RunnerFactory
from skyward_core.worker.runner_output import Stream
from skyward_core.worker.settings import NodeSettings
from skyward_core.worker.slot import Slot, _BatchRun
from skyward_core.worker.wire import Batch, Call, Parcel
from tests.fakes import FakeProvider

PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49\nAwEHBG0wawIBAQQg\n-----END PRIVATE KEY-----\n"


class NoRunner(RunnerFactory):
    """Forks nothing: packets stay in its queue."""

    def __init__(self) -> None:
        pass

    def watch(self, pid: int, on_exit: object) -> None:
        pass

    def fork(self, descriptors: list[int], mark: bytes) -> int:
        """Return an invalid pid."""
        return 0


# ── references ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_refers_to_the_variable_of_that_name() -> None:
    """Names, one name, and references are equal, also after JSON."""
    spec = sky.PoolSpec.of(secrets=("HF_TOKEN",))
    assert spec.secrets == {"HF_TOKEN": sky.Secret.from_env("HF_TOKEN")}
    assert (
        spec
        == sky.PoolSpec.of(secrets="HF_TOKEN")
        == sky.PoolSpec.of(secrets={"HF_TOKEN": sky.Secret.from_env("HF_TOKEN")})
    )
    assert spec != sky.PoolSpec.of(secrets={"HF_TOKEN": sky.Secret.from_env("OTHER")})
    both = sky.PoolSpec.of(secrets={"A": sky.Secret.from_env("B"), "C": sky.Secret.from_store("d", "login")})
    for one in (spec, both, sky.PoolSpec.of(secrets=[])):
        assert sky.PoolSpec.model_validate_json(one.model_dump_json(exclude_unset=True)) == one
        assert sky.PoolSpec.of(**json.loads(one.model_dump_json())) == one
        assert pickle.loads(pickle.dumps(one)) == one
        assert one.with_(nodes=2).secrets == one.secrets


@pytest.mark.parametrize(
    "requested",
    [
        {"HF_TOKEN": "hf_value"},
        ("hf-value with spaces",),
        {"hf-value": sky.Secret.from_env("A")},
        7,
        (7,),
        {"A": {"key": "hf_value", "x": 1}},
    ],
)
def test_a_value_in_place_of_a_reference_is_refused_and_not_shown(requested: Any) -> None:
    """The message shows the correct form, and not the value."""
    with pytest.raises(sky.BadRequest) as caught:
        sky.PoolSpec.of(secrets=requested)
    assert "hf_value" not in str(caught.value)
    assert "hf-value" not in str(caught.value)
    assert "hf_value" not in "".join(traceback.format_exception(caught.value))


def test_a_variable_cannot_be_in_env_and_in_secrets() -> None:
    """The same name in env and in secrets is an error; so is one of our own names."""
    with pytest.raises(sky.BadRequest, match="HF_TOKEN stands in env and in secrets"):
        sky.PoolSpec.of(secrets=("HF_TOKEN",), env={"HF_TOKEN": "x"})
    with pytest.raises(sky.BadRequest, match="HF_TOKEN stands in env and in secrets"):
        sky.PoolSpec.of(secrets=("HF_TOKEN",), image=sky.Image(env={"HF_TOKEN": "x"}))
    with pytest.raises(sky.BadRequest, match="belongs to us"):
        sky.PoolSpec.of(secrets=("SKYWARD_POOL_ID",))


def test_values_are_read_where_the_pool_opens() -> None:
    """Given values have priority; the rest is read from the environment under the name in the reference."""
    secrets = {"A": sky.Secret.from_env("A"), "B": sky.Secret.from_env("OTHER"), "C": sky.Secret.from_store("c")}
    assert read_values(secrets, {"C": "of the store"}, {"A": "a", "OTHER": "b"}) == {
        "A": "a",
        "B": "b",
        "C": "of the store",
    }
    assert read_values(secrets, {"A": "mine", "C": "c"}, {"A": "a", "OTHER": "b"})["A"] == "mine"
    assert "of the store" not in repr(read_values(secrets, {"C": "of the store"}, {"A": "a", "OTHER": "b"}))


@pytest.mark.parametrize(
    ("environ", "given", "words"),
    [
        ({}, {}, ["A (environment variable A is not set", "B (environment variable OTHER is not set", "C (entry 'c'"]),
        ({"A": "", "OTHER": "b"}, {"C": "c"}, ["A (environment variable A is not set, or empty"]),
        ({"A": "a", "OTHER": "b"}, {}, ["C (entry 'c' of the orchestrator's store"]),
        ({"A": "a", "OTHER": "b"}, {"C": "c", "D": "d"}, ["values were given for D"]),
        ({"A": "sec\0ret", "OTHER": "b"}, {"C": "c"}, ["values of A hold a NUL"]),
        ({"A": "secret" * LARGEST_BYTES, "OTHER": "b"}, {"C": "c"}, ["limit"]),
    ],
)
def test_missing_values_are_named_and_no_value_is_shown(
    environ: dict[str, str], given: dict[str, str], words: list[str]
) -> None:
    """All missing ones are named at once."""
    secrets = {"A": sky.Secret.from_env("A"), "B": sky.Secret.from_env("OTHER"), "C": sky.Secret.from_store("c")}
    with pytest.raises(sky.BadRequest) as caught:
        read_values(secrets, given, environ)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "secret" not in str(caught.value).replace("secrets", "")


@pytest.mark.parametrize("value", ["hunter2-\ud800", "hunter2-\ud83d\ude00"])
def test_a_value_that_no_variable_can_hold_is_refused_and_not_shown(value: str) -> None:
    """A store may hold such a value: half of a surrogate pair of UTF-16.

    It would end every process of calls, and the error at opening would show the value.
    """
    with pytest.raises(sky.BadRequest, match="the values of A hold") as caught:
        read_values({"A": sky.Secret.from_store("a")}, {"A": value}, {})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)


def as_sentry_shows(value: Any) -> str:
    """The serializer of Sentry's SDK takes mappings apart that have no `__sentry_repr__` (sentry_sdk/serializer.py)."""
    if (show := getattr(type(value), "__sentry_repr__", None)) is not None:
        return show(value)
    return (
        str({name: as_sentry_shows(item) for name, item in value.items()})
        if type(value) is not dict and isinstance(value, dict)
        else repr(value)
    )


def test_the_variables_of_our_frames_show_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error reporters show the variables of every frame, as Sentry does by default, and rich's tracebacks
    by an option.
    """
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.delenv("OTHER", raising=False)
    secrets = {
        "HF_TOKEN": sky.Secret.from_env("HF_TOKEN"),
        "GIVEN": sky.Secret.from_store("g"),
        "OTHER": sky.Secret.from_env("OTHER"),
    }

    def shown(error: BaseException) -> str:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename != __file__]
        assert frames
        texts = list[str]()
        for value in (value for frame in frames for value in frame.f_locals.values()):
            with suppress(AttributeError):  # a pool that is half made
                texts.append(as_sentry_shows(value))
        return "\n".join(texts)

    for env in ({}, {"A": MASK}):  # one is refused when it opens, and one when it is made
        with pytest.raises(sky.BadRequest) as caught:
            sky.ComputePool.from_spec(
                sky.PoolSpec.of(secrets=secrets, env=env, display="quiet"), secrets={"GIVEN": "hf_given_9876"}
            ).open()
        assert "GIVEN" in shown(caught.value)
        assert "hf_0123456789" not in shown(caught.value)
        assert "hf_given_9876" not in shown(caught.value)


@pytest.mark.parametrize(
    "requested",
    [lambda value: (value,), lambda value: value, lambda value: {value: sky.Secret.from_env("A")}, sky.Secret.from_env],
)
def test_the_value_of_a_variable_is_refused_as_a_name(monkeypatch: pytest.MonkeyPatch, requested: Any) -> None:
    """`secrets=os.environ["HF_TOKEN"]` is an error. Most tokens could be names, and would then be in the ledger and in
    the message about missing variables.
    """
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    monkeypatch.setenv("SKYWARD_SECRETS", "NOT_SET_HERE")
    with pytest.raises(sky.BadRequest, match="value of HF_TOKEN") as caught:
        sky.PoolSpec.of(secrets=requested(os.environ["HF_TOKEN"]))
    assert "hf_0123456789abcdef" not in "".join(traceback.format_exception(caught.value))
    assert sky.PoolSpec.of(secrets=("NOT_SET_HERE",)).secrets


def test_a_missing_secret_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before any machine is rented, and names the variable."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    provider = FakeProvider(folder=str(tmp_path))
    # the machines never answer
    pool = sky.ComputePool(provider=provider, secrets=("HF_TOKEN",), display="quiet", provision_timeout=0.1)
    with pytest.raises(sky.BadRequest, match="HF_TOKEN"):
        pool.open()
    assert provider.machines.launched == []
    assert not pool.is_active


# ── values in env that look like secrets ─────────────────────────────────────────────────────────────────────────────


SECRET_NAMES = (
    "HF_TOKEN hf_token GITHUB_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN DB_PASSWORD MYSQL_PWD PGPASSWORD SMTP_PASS OPENAI_API_KEY "
    "WANDB_API_KEY apiKey API_KEY2 SSH_PRIVATE_KEY CREDENTIALS CREDENTIAL client_secret ClientSecret KEYSTORE_PASSPHRASE AZURE_STORAGE_KEY GITHUB_PAT"
)
PLAIN_NAMES = (
    "TOKENIZERS_PARALLELISM MAX_TOKENS OMP_NUM_THREADS PWD OLDPWD PATH KEY SORT_KEY PUBLIC_KEY MONKEY PASSENGERS COMPASS BYPASS AWS_REGION TOKEN_FILE "
    "GOOGLE_APPLICATION_CREDENTIALS AWS_WEB_IDENTITY_TOKEN_FILE SSL_CERT_FILE SECRETS_DIR PATTERN _ A"
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_that_look_like_secrets(name: str) -> None:
    """Case and spelling do not matter."""
    assert looks_secret(name)


@pytest.mark.parametrize("name", PLAIN_NAMES.split())
def test_names_that_do_not_look_like_secrets(name: str) -> None:
    """A word that only begins in the same way, and variables that say where a secret is."""
    assert not looks_secret(name)


def test_a_url_with_user_information_is_a_secret_under_any_name() -> None:
    """It may be the URL of a proxy, an index or a database."""
    assert looks_secret("https_proxy", "http://me:word@proxy:3128")
    assert looks_secret("UV_INDEX", "https://token@pypi.example.org/simple")
    assert looks_secret("DATABASE_URL", "postgresql://u:p@db/x")
    assert not looks_secret("https_proxy", "http://proxy:3128/a@b")


def both_envs() -> sky.PoolSpec:
    return sky.PoolSpec.of(
        image=sky.Image(env={"DB_PASSWORD": "opensesame1", "A": "1"}), env={"HF_TOKEN": "hf_0123456789", "B": "2"}
    )


def test_env_is_masked_where_a_spec_is_shown_or_written() -> None:
    """In repr, str, JSON and error messages. In Python the values stay, also after pickle and `with_`."""
    spec = both_envs()
    shown = [
        repr(spec),
        str(spec),
        f"{spec.env}",
        repr(spec.image),
        spec.model_dump_json(),
        spec.image.model_dump_json(),
        repr(spec.model_dump(mode="json")),
    ]
    for text in shown:
        assert "opensesame1" not in text
        assert "hf_0123456789" not in text
    assert spec.model_dump(mode="json")["env"] == {"HF_TOKEN": MASK, "B": "2"}
    assert "hf_0123456789" not in as_sentry_shows(spec.env)
    assert spec.node_environment == {"DB_PASSWORD": "opensesame1", "A": "1", "HF_TOKEN": "hf_0123456789", "B": "2"}
    assert pickle.loads(pickle.dumps(spec)).with_(nodes=2).node_environment == spec.node_environment
    assert spec.plain_secrets == ["DB_PASSWORD", "HF_TOKEN"]


def test_a_pool_warns_of_values_that_it_cannot_mask(caplog: pytest.LogCaptureFixture) -> None:
    """It warns of values in env that look like secrets, with the correct form, and of values that are too short to
    mask.

    The warning has names only.

    Looks inside: the values are read when the pool opens.
    """
    pool: Any = sky.ComputePool.from_spec(
        both_envs().with_(secrets={"PIN": sky.Secret.from_store("pin")}), secrets={"PIN": "42a"}
    )
    assert pool._prepared.read_secrets() == {"PIN": "42a"}
    short, plain = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert short.startswith("PIN: too short")
    assert plain.startswith("env holds DB_PASSWORD, HF_TOKEN as plain text")
    assert "secrets=('DB_PASSWORD',)" in plain
    for value in ("42a", "opensesame1", "hf_0123456789"):
        assert value not in caplog.text


def test_a_masked_spec_cannot_be_used(tmp_path: Path) -> None:
    """A spec that comes back from JSON can be read, compared and shown. A pool, a script and an environment of it are
    refused, with the name and what to do.
    """
    again = sky.PoolSpec.model_validate_json(both_envs().model_dump_json())
    assert again != both_envs()
    assert again == sky.PoolSpec.model_validate_json(again.model_dump_json())
    provider = FakeProvider(folder=str(tmp_path))
    with pytest.raises(sky.BadRequest, match=r"DB_PASSWORD.*secrets=\('DB_PASSWORD',\)"):
        sky.ComputePool.from_spec(again, credentials=provider)
    with pytest.raises(sky.BadRequest, match="DB_PASSWORD"):
        again.image.bootstrap()
    with pytest.raises(sky.BadRequest, match="DATABASE_URL"):
        sky.ComputePool(env={"DATABASE_URL": MASK}, provider=provider)
    with pytest.raises(sky.BadRequest, match="HF_TOKEN"):
        again.with_(image=sky.Image()).refuse_what_cannot_be()
    mended = again.with_(image=sky.Image(), env={"B": "2"}, secrets=("HF_TOKEN", "DB_PASSWORD"))
    mended.refuse_what_cannot_be()


# ── masks in text ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("user", ["", "a:", "me:", "you:"])
@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
def test_base64_of_a_value_is_masked_alone_and_behind_a_user(user: str, encode: Any) -> None:
    """HTTP libraries log the header `Authorization: Basic` with it; the rest of it is less than one character of the
    value.
    """
    value = "s3cr3t?>/~Zq8\xff"
    left = Mask([value]).text(f"Basic {encode((user + value + ':x').encode()).decode()}") + Mask([value]).text(
        encode((user + value).encode()).decode()
    )
    assert left.count(MASK) == 2
    for offset in range(3):
        assert encode(b"." * offset + value.encode())[4:12].decode() not in left


AWKWARD = 'p@ss\'w\u00f6rd!$&=+/ "x"'


@pytest.mark.parametrize(
    "quoted",
    [
        "p%40ss'w%C3%B6rd!$&=+%2F%20%22x%22",  # URLs of WHATWG and yarl quote less
        "p%40ss'w%C3%B6rd!%24%26%3D%2B%2F%20%22x%22",  # JavaScript's encodeURIComponent
        repr(AWKWARD.encode())[2:-1],  # the request as http.client shows it
        ascii(AWKWARD)[1:-1],
        html.escape(AWKWARD, quote=False),
        shlex.quote(AWKWARD)[1:-1],
        AWKWARD.replace("'", "'\\''"),  # bash -x
        AWKWARD.encode().hex(),
        AWKWARD.encode().hex().upper(),
        AWKWARD.encode("utf-16-le").decode(errors="backslashreplace"),
        AWKWARD.encode("utf-16-be").decode(errors="backslashreplace"),
    ],
)
def test_a_value_is_masked_as_programs_quote_it(quoted: str) -> None:
    """Every quoting removes the whole value; only the text around it remains."""
    left = Mask([AWKWARD]).text(f"<{quoted}>")
    assert left.replace("\0", "") == f"<{MASK}>"


@pytest.mark.parametrize("separator", ["\r", "\r\n", "\n", "\n\n"])
def test_each_line_is_masked_wherever_output_is_cut_into_lines(separator: str) -> None:
    """A carriage return ends a line of output; a form feed does not."""
    value = separator.join(["first-line", "second\x0cline", "third-line"])
    stream = Stream("stdout", 0, b"\x1emark\x1e", rest=f"{value}\n".encode())
    lines = [line for _, lines in stream.lines() for line in lines]
    assert len(lines) >= 3
    assert {Mask([value]).text(line) for line in lines} <= {MASK, ""}


def test_text_without_values_does_not_change() -> None:
    """A short value, which may be part of many words, is not masked."""
    for mask in (Mask(), Mask(["", "abc"]), Mask(["   a"])):
        assert mask.text("abc and an ***") == "abc and an ***"


def test_all_parts_of_an_exception_are_masked() -> None:
    """Its arguments, attributes, notes, causes and the members of a group. Objects without a secret stay the same
    objects.
    """
    mask = Mask(["hf_0123456789"])
    kept = object()
    inner = KeyError("hf_0123456789")
    inner.add_note("with hf_0123456789")
    error: Any = ValueError("bad hf_0123456789", kept, {"hf_0123456789": ["hf_0123456789"]}, 7)
    error.url, error.kept = "https://hf_0123456789@x", [kept]
    error.__cause__ = ExceptionGroup("hf_0123456789 twice", [inner, OSError(2, "no hf_0123456789", "/hf_0123456789")])
    kept_list = error.kept
    mask.error(error)
    assert error.args == ("bad ***", kept, {MASK: [MASK]}, 7)
    assert error.kept is kept_list
    assert inner.__notes__ == ["with ***"]
    assert "hf_0123456789" not in repr(vars(error)) + repr(error.__cause__.args) + repr(inner)


def test_bytes_of_an_exception_are_masked() -> None:
    """As in a response, and in undecodable bytes. This includes short values, which are not searched for in
    a pickle.
    """
    error: Any = ValueError(b"no opensesame", [bytearray(b"opensesame")])
    error.body = b'{"password": "opensesame"}'
    Mask(["opensesame"]).error(error)
    assert error.args == (b"no ***", [bytearray(b"***")])
    assert error.body == b'{"password": "***"}'


class Pickled(Exception):
    """Is pickled as its class defines."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Pickled, self.args


def test_a_short_value_is_masked_in_an_exception_that_is_pickled_in_its_own_way() -> None:
    """It is removed from the exception itself, before its class pickles it."""
    parcel = _failed("call", Pickled("not opensesame"), 0.0, Mask(["opensesame"])).parcel
    assert b"opensesame" not in parcel.data
    assert unpack(parcel.data, parcel.buffers, 0, "").args == ("not ***",)


class Refused(Exception):
    """Has its value in an object of its own."""

    def __init__(self, body: Any) -> None:
        super().__init__("refused")
        self.body = body

    def __str__(self) -> str:
        return f"refused: {self.body.text}"


class Body:
    """A response, as libraries keep it in an exception."""

    def __init__(self, text: str, *parts: Any) -> None:
        self.text, self.parts = text, parts


def test_a_cut_message_has_no_half_of_a_value() -> None:
    """The message is masked before it is cut."""
    value = "hf_0123456789abcdef"
    for length in range(MESSAGE_CHARACTERS - len(value), MESSAGE_CHARACTERS + 1):
        error = Refused(Body("." * (length - len("refused: ")) + value))
        outcome = _failed("call", error, 0.0, Mask([value]))
        assert value[:8].encode() not in outcome.parcel.data
        assert value[:8] not in outcome.text


def test_an_object_of_an_exception_has_no_spelling_of_a_value() -> None:
    """Nor has a large array that is sent beside the pickle."""
    value = "p@ss/word-0123456789"
    body = Body(
        value, quote(value, safe=""), b64encode(value.encode()), np.frombuffer(value.encode() * 20_000, dtype=np.uint8)
    )
    parcel = _failed("call", Refused(body), 0.0, Mask([value])).parcel
    assert len(parcel.buffers) == 1
    for spelling in (value, quote(value, safe=""), b64encode(value.encode()).decode()):
        for data in (parcel.data, *map(bytes, parcel.buffers)):
            assert spelling.encode() not in data
    error: Any = unpack(parcel.data, parcel.buffers, 0, "")
    assert (len(error.body.text), error.body.parts[2].nbytes) == (len(value), len(value) * 20_000)


# ── transmission ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_have_the_names_of_secrets_and_no_value() -> None:
    """They are a file on the node's disk."""
    fields = dict.fromkeys(("pool_id", "instance_id", "host", "head_host", "tls_certificate", "tls_key"), "x")
    settings = NodeSettings(
        **fields, rank=0, total_nodes=1, slots=1, head_port=1, value_directories=("/x",), secret_names=("HF_TOKEN",)
    )
    assert NodeSettings.from_json(settings.to_json()) == settings


def test_packets_do_not_show_values() -> None:
    """Nor do the objects that have them."""
    values = SecretValues(HF_TOKEN="hf_0123456789")
    packet = Packet(None, None, secrets=values)  # type: ignore[arg-type]
    assert "hf_0" not in f"{values} {values!r} {packet} {Mask(values.values())!r}"
    assert pickle.loads(pickle.dumps(packet)).secrets == values


def test_each_line_of_a_key_is_masked() -> None:
    """Lines are emitted one by one."""
    mask = Mask([PEM])
    assert {mask.text(line) for line in PEM.splitlines()} == {MASK}
    assert mask.text(repr(PEM)) == f"'{MASK}'"


@pytest.mark.parametrize("value", ["caf\udce9-au-lait", "caf\udcff\udcfe12"])
def test_a_value_that_is_not_utf_8_is_masked(value: str) -> None:
    """An environment variable may hold any bytes. Python prints those of a runner escaped, and those of a child are
    escaped when they are read.
    """
    texts = [
        value.encode(errors="backslashreplace").decode(),
        os.fsencode(value).decode(errors="backslashreplace"),
        repr(value),
    ]
    assert [Mask([value]).text(text) for text in texts] == [MASK, MASK, f"'{MASK}'"]


@pytest.mark.parametrize(
    "make", [lambda env: sky.PoolSpec.of(env=env), lambda env: sky.Image(env=env), lambda env: sky.PoolSpec(env=env)]
)
def test_a_message_about_env_holds_no_value(make: Any) -> None:
    """Another variable of env may have any error."""
    with pytest.raises(ValueError) as caught:
        make({"HF_TOKEN": "hf_0123456789", "1X": "2"})
    assert "1X" in str(caught.value)
    assert "hf_0123456789" not in str(caught.value)


def test_the_values_are_sent_again_after_their_packet_was_taken_back(tmp_path: Path) -> None:
    """A call is cancelled before its runner has begun it. The runner does not have the values yet, and the next packet
    has them.

    Looks inside: the packet is taken back at one moment.
    """
    slot = Slot(NoRunner(), (str(tmp_path),))
    try:
        slot.furnish(SecretValues(HF_TOKEN="hf_0123456789"))
        calls = tuple(Call(name, "f", Parcel(b""), "job") for name in "ab")
        run: Any = _BatchRun(slot, Batch("topic", calls, {"f": Parcel(b"")}), lambda _: None)
        run._send()
        packets = [pickle.loads(slot.take.recv(1 << 20)) for _ in calls]
        assert [packet.secrets for packet in packets] == [{"HF_TOKEN": "hf_0123456789"}, None]
        for packet in packets:
            slot.send.send(pickle.dumps(packet))
        run._waiting.extend(run._take_back())
        run._send()
        assert pickle.loads(slot.take.recv(1 << 20)).secrets == {"HF_TOKEN": "hf_0123456789"}
    finally:
        slot.close()
