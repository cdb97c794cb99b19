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
from skyward_core.errors import ShortTraceback
from skyward_core.secret import LARGEST_BYTES, looks_secret, read_values
from skyward_core.serialization.exceptions import MESSAGE_CHARACTERS, unpack
from skyward_core.wire.masking import MASK, Mask, SecretValues
from skyward_core.wire.messages import Batch, Call, Parcel
from skyward_core.wire.settings import NodeSettings
from skyward_core.worker.runner import Packet, _failed
from skyward_core.worker.runner_process import RunnerFactory, Stream
from skyward_core.worker.slot import Slot, _BatchRun
from tests.fakes import FakeProvider

TOKEN = "hf_0123456789"
REFERENCES = {"A": sky.Secret.from_env("A"), "B": sky.Secret.from_env("OTHER"), "C": sky.Secret.from_store("c")}


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


# ── references ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_refers_to_the_variable_of_that_name() -> None:
    spec = sky.PoolSpec.of(secrets=("HF_TOKEN",))
    assert spec == sky.PoolSpec.of(secrets="HF_TOKEN")
    assert spec.secrets == {"HF_TOKEN": sky.Secret.from_env("HF_TOKEN")}
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
        ("hf_value with spaces",),
        {"hf_value-x": sky.Secret.from_env("A")},
        7,
        (7,),
        {"A": {"key": "hf_value", "x": 1}},
    ],
)
def test_a_value_in_place_of_a_reference_is_refused_and_not_shown(requested: Any) -> None:
    with pytest.raises(sky.BadRequest) as caught:
        sky.PoolSpec.of(secrets=requested)
    assert "hf_value" not in shown(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"secrets": ("HF_TOKEN",), "env": {"HF_TOKEN": "x"}}, "HF_TOKEN stands in env and in secrets"),
        ({"secrets": ("A",), "image": sky.Image(env={"A": "x"})}, "A stands in env and in secrets"),
        ({"secrets": ("SKYWARD_POOL_ID",)}, "belongs to us"),
    ],
)
def test_a_name_that_is_taken_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(sky.BadRequest, match=words):
        sky.PoolSpec.of(**fields)


def test_values_are_read_where_the_pool_opens() -> None:
    """Given values have priority; the rest is read from the environment under the name in the reference."""
    values = read_values(REFERENCES, {"C": "of the store"}, {"A": "a", "OTHER": "b"})
    assert values == {"A": "a", "B": "b", "C": "of the store"}
    assert "of the store" not in repr(values)
    assert read_values(REFERENCES, {"A": "mine", "C": "c"}, {"A": "a", "OTHER": "b"})["A"] == "mine"


BOTH = {"A": "a", "OTHER": "b"}


@pytest.mark.parametrize(
    ("environ", "given", "words"),
    [
        ({}, {}, ["A (environment variable A is not set", "B (environment variable OTHER is not set", "C (entry 'c'"]),
        (BOTH | {"A": ""}, {"C": "c"}, ["A (environment variable A is not set, or empty"]),
        (BOTH, {}, ["C (entry 'c' of the orchestrator's store"]),
        (BOTH, {"C": "c", "D": "d"}, ["values were given for D"]),
        (BOTH | {"A": "hush\0hush"}, {"C": "c"}, ["values of A hold a NUL"]),
        (BOTH | {"A": "hush" * LARGEST_BYTES}, {"C": "c"}, ["limit"]),
        # half of a surrogate pair, which a store may hold: it would end every process of calls
        (BOTH, {"C": "hush-\ud800"}, ["the values of C hold"]),
        (BOTH, {"C": "hush-\ud83d\ude00"}, ["the values of C hold"]),
    ],
)
def test_missing_and_impossible_values_are_named_and_not_shown(
    environ: dict[str, str], given: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(sky.BadRequest) as caught:
        read_values(REFERENCES, given, environ)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "hush" not in shown(caught.value)


def as_sentry_shows(value: Any) -> str:
    """The serializer of Sentry's SDK takes mappings apart that have no `__sentry_repr__` (sentry_sdk/serializer.py)."""
    if (show := getattr(type(value), "__sentry_repr__", None)) is not None:
        return show(value)
    if type(value) is not dict and isinstance(value, dict):
        return str({name: as_sentry_shows(item) for name, item in value.items()})
    return repr(value)


@pytest.mark.parametrize("env", [{}, {"A": MASK}], ids=["refused when it opens", "refused when it is made"])
def test_the_variables_of_our_frames_show_no_value(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    """Error reporters show the variables of every frame, as Sentry does by default. An expected error leaves without
    our frames, and any other has them, so this looks at them.
    """
    monkeypatch.setattr(ShortTraceback, "__exit__", lambda *_: None)
    monkeypatch.setenv("A", TOKEN)
    monkeypatch.delenv("OTHER", raising=False)
    secrets = {"HF_TOKEN": sky.Secret.from_env("A"), "GIVEN": sky.Secret.from_store("g"), "B": REFERENCES["B"]}
    spec = sky.PoolSpec.of(secrets=secrets, env=env, display="quiet")
    with pytest.raises(sky.BadRequest) as caught:
        sky.ComputePool.from_spec(spec, secrets={"GIVEN": "hf_given_9876"}).open()
    frames = [frame for frame, _ in traceback.walk_tb(caught.tb) if frame.f_code.co_filename != __file__]
    texts = list[str]()
    for value in (value for frame in frames for value in frame.f_locals.values()):
        with suppress(AttributeError):  # a pool that is half made
            texts.append(as_sentry_shows(value))
    assert "GIVEN" in str(texts)
    assert TOKEN not in str(texts)
    assert "hf_given_9876" not in str(texts)


@pytest.mark.parametrize(
    "requested",
    [lambda value: (value,), lambda value: value, lambda value: {value: sky.Secret.from_env("A")}, sky.Secret.from_env],
)
def test_the_value_of_a_variable_is_refused_as_a_name(monkeypatch: pytest.MonkeyPatch, requested: Any) -> None:
    """`secrets=os.environ["HF_TOKEN"]`: most tokens could be names, and would then be in the ledger."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("SKYWARD_SECRETS", "NOT_SET_HERE")
    with pytest.raises(sky.BadRequest, match="value of HF_TOKEN") as caught:
        sky.PoolSpec.of(secrets=requested(os.environ["HF_TOKEN"]))
    assert TOKEN not in shown(caught.value)
    assert sky.PoolSpec.of(secrets=("NOT_SET_HERE",)).secrets


def test_a_missing_secret_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    provider = FakeProvider(folder=str(tmp_path))
    pool = sky.ComputePool(provider=provider, secrets=("HF_TOKEN",), display="quiet", provision_timeout=0.1)
    with pytest.raises(sky.BadRequest, match="HF_TOKEN"):
        pool.open()
    assert provider.machines.launched == []
    assert not pool.is_active


# ── values in env that look like secrets ─────────────────────────────────────────────────────────────────────────────

SECRET_NAMES = (
    "HF_TOKEN hf_token AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID DB_PASSWORD MYSQL_PWD PGPASSWORD SMTP_PASS OPENAI_API_KEY "
    "apiKey API_KEY2 SSH_PRIVATE_KEY CREDENTIALS client_secret ClientSecret KEYSTORE_PASSPHRASE AZURE_STORAGE_KEY GITHUB_PAT"
)
PLAIN_NAMES = (
    "TOKENIZERS_PARALLELISM MAX_TOKENS OMP_NUM_THREADS PWD OLDPWD PATH KEY SORT_KEY PUBLIC_KEY MONKEY PASSENGERS COMPASS "
    "BYPASS AWS_REGION TOKEN_FILE GOOGLE_APPLICATION_CREDENTIALS AWS_WEB_IDENTITY_TOKEN_FILE SECRETS_DIR PATTERN _ A"
)


def test_which_variables_look_like_secrets() -> None:
    """Not those that say where a secret is. A URL with user information is one under any name."""
    assert [name for name in SECRET_NAMES.split() if not looks_secret(name)] == []
    assert [name for name in PLAIN_NAMES.split() if looks_secret(name)] == []
    for url in ("http://me:word@proxy:3128", "https://token@pypi.example.org/simple", "postgresql://u:p@db/x"):
        assert looks_secret("UV_INDEX", url)
    assert not looks_secret("https_proxy", "http://proxy:3128/a@b")


def both_envs() -> sky.PoolSpec:
    image = sky.Image(env={"DB_PASSWORD": "opensesame1", "A": "1"})
    return sky.PoolSpec.of(image=image, env={"HF_TOKEN": TOKEN, "B": "2"})


def test_env_is_masked_where_a_spec_is_shown_or_written() -> None:
    """In Python the values stay, also after pickle and `with_`."""
    spec = both_envs()
    texts = [repr(spec), str(spec), f"{spec.env}", repr(spec.image), spec.model_dump_json(), as_sentry_shows(spec.env)]
    texts += [spec.image.model_dump_json(), repr(spec.model_dump(mode="json"))]
    assert [text for text in texts if "opensesame1" in text or TOKEN in text] == []
    assert spec.model_dump(mode="json")["env"] == {"HF_TOKEN": MASK, "B": "2"}
    assert spec.node_environment == {"DB_PASSWORD": "opensesame1", "A": "1", "HF_TOKEN": TOKEN, "B": "2"}
    assert pickle.loads(pickle.dumps(spec)).with_(nodes=2).node_environment == spec.node_environment
    assert spec.plain_secrets == ["DB_PASSWORD", "HF_TOKEN"]


def test_a_pool_warns_of_values_that_it_cannot_mask(caplog: pytest.LogCaptureFixture) -> None:
    """Looks inside: the values are read when the pool opens."""
    spec = both_envs().with_(secrets={"PIN": sky.Secret.from_store("pin")})
    pool: Any = sky.ComputePool.from_spec(spec, secrets={"PIN": "42a"})
    assert pool._prepared.read_secrets() == {"PIN": "42a"}
    short, plain = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert short.startswith("PIN: too short")
    assert plain.startswith("env holds DB_PASSWORD, HF_TOKEN as plain text")
    assert "secrets=('DB_PASSWORD',)" in plain
    assert [value for value in ("42a", "opensesame1", TOKEN) if value in caplog.text] == []


def test_a_masked_spec_cannot_be_used(tmp_path: Path) -> None:
    """A spec that comes back from JSON can be read, compared and shown, and no more."""
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
    again.with_(image=sky.Image(), env={"B": "2"}, secrets=("HF_TOKEN", "DB_PASSWORD")).refuse_what_cannot_be()


@pytest.mark.parametrize("make", [lambda env: sky.PoolSpec.of(env=env), lambda env: sky.Image(env=env)])
def test_a_message_about_env_holds_no_value(make: Any) -> None:
    with pytest.raises(ValueError, match="1X") as caught:
        make({"HF_TOKEN": TOKEN, "1X": "2"})
    assert TOKEN not in str(caught.value)


# ── masks in text ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("user", ["", "a:", "me:", "you:"])
@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
def test_base64_of_a_value_is_masked_alone_and_behind_a_user(user: str, encode: Any) -> None:
    """HTTP libraries log `Authorization: Basic` with it; the rest of it is less than one character of the value."""
    value = "s3cr3t?>/~Zq8\xff"
    header, alone = (encode((user + value + end).encode()).decode() for end in (":x", ""))
    left = Mask([value]).text(f"Basic {header}") + Mask([value]).text(alone)
    assert left.count(MASK) == 2
    for offset in range(3):
        assert encode(b"." * offset + value.encode())[4:12].decode() not in left


AWKWARD = 'p@ss\'w\u00f6rd!$&=+/ "x"'
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49\nAwEHBG0wawIBAQQg\n-----END PRIVATE KEY-----\n"


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
    assert Mask([AWKWARD]).text(f"<{quoted}>").replace("\0", "") == f"<{MASK}>"


@pytest.mark.parametrize("separator", ["\r", "\r\n", "\n", "\n\n"])
def test_each_line_is_masked_wherever_output_is_cut_into_lines(separator: str) -> None:
    """A carriage return ends a line of output; a form feed does not."""
    value = separator.join(["first-line", "second\x0cline", "third-line"])
    stream = Stream("stdout", 0, b"\x1emark\x1e", rest=bytearray(f"{value}\n".encode()))
    lines = [line for _, lines in stream.lines() for line in lines]
    assert len(lines) >= (2 if separator == "\r" else 3)  # of a progress bar few states pass
    assert {Mask([value]).text(line) for line in lines} <= {MASK, ""}
    assert {Mask([PEM]).text(line) for line in PEM.splitlines()} == {MASK}
    assert Mask([PEM]).text(repr(PEM)) == f"'{MASK}'"


@pytest.mark.parametrize("value", ["caf\udce9-au-lait", "caf\udcff\udcfe12"])
def test_a_value_that_is_not_utf_8_is_masked(value: str) -> None:
    """Python prints those of a runner escaped, and those of a child are escaped when they are read."""
    escaped = value.encode(errors="backslashreplace").decode()
    for text in (escaped, os.fsencode(value).decode(errors="backslashreplace"), repr(value)[1:-1]):
        assert Mask([value]).text(text) == MASK


def test_a_short_value_is_not_masked() -> None:
    """It may be part of many words."""
    for mask in (Mask(), Mask(["", "abc"]), Mask(["   a"])):
        assert mask.text("abc and an ***") == "abc and an ***"


# ── masks in exceptions ──────────────────────────────────────────────────────────────────────────────────────────────


def test_all_parts_of_an_exception_are_masked() -> None:
    """Also bytes, as in a response. Objects without a secret stay the same objects."""
    kept, inner = object(), KeyError(TOKEN)
    inner.add_note(f"with {TOKEN}")
    error: Any = ValueError(f"bad {TOKEN}", kept, {TOKEN: [TOKEN]}, 7, [bytearray(TOKEN.encode())])
    error.url, error.kept, error.body = f"https://{TOKEN}@x", [kept], f'{{"password": "{TOKEN}"}}'.encode()
    error.__cause__ = ExceptionGroup(f"{TOKEN} twice", [inner, OSError(2, f"no {TOKEN}", f"/{TOKEN}")])
    kept_list = error.kept
    Mask([TOKEN]).error(error)
    assert error.args == ("bad ***", kept, {MASK: [MASK]}, 7, [bytearray(b"***")])
    assert error.body == b'{"password": "***"}'
    assert error.kept is kept_list
    assert inner.__notes__ == ["with ***"]
    assert TOKEN not in repr(vars(error)) + repr(error.__cause__.args) + repr(inner)


class Pickled(Exception):
    """Is pickled as its class defines."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Pickled, self.args


def test_a_value_is_masked_in_an_exception_that_is_pickled_in_its_own_way() -> None:
    parcel = _failed("call", Pickled("not opensesame"), 0.0, Mask(["opensesame"])).parcel
    assert b"opensesame" not in parcel.data
    assert unpack(parcel.data, parcel.buffers, 0, "").args == ("not ***",)


class Body:
    """A response, as libraries keep it in an exception."""

    def __init__(self, text: str, *parts: Any) -> None:
        self.text, self.parts = text, parts


class Refused(Exception):
    def __init__(self, body: Body) -> None:
        super().__init__("refused")
        self.body = body

    def __str__(self) -> str:
        return f"refused: {self.body.text}"


def test_a_cut_message_has_no_half_of_a_value() -> None:
    for length in range(MESSAGE_CHARACTERS - len(TOKEN), MESSAGE_CHARACTERS + 1):
        error = Refused(Body("." * (length - len("refused: ")) + TOKEN))
        outcome = _failed("call", error, 0.0, Mask([TOKEN]))
        assert TOKEN[:8].encode() not in outcome.parcel.data
        assert TOKEN[:8] not in outcome.text


def test_an_object_of_an_exception_has_no_spelling_of_a_value() -> None:
    """Nor has a large array that is sent beside the pickle."""
    value = "p@ss/word-0123456789"
    spellings = [value, quote(value, safe=""), b64encode(value.encode()).decode()]
    body = Body(*spellings, np.frombuffer(value.encode() * 20_000, dtype=np.uint8))
    parcel = _failed("call", Refused(body), 0.0, Mask([value])).parcel
    assert len(parcel.buffers) == 1
    for data in (parcel.data, *map(bytes, parcel.buffers)):
        assert [spelling for spelling in spellings if spelling.encode() in data] == []
    error: Any = unpack(parcel.data, parcel.buffers, 0, "")
    assert (len(error.body.text), error.body.parts[2].nbytes) == (len(value), len(value) * 20_000)


# ── transmission ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_have_the_names_of_secrets_and_no_value() -> None:
    """They are a file on the node's disk."""
    fields = dict.fromkeys(("pool_id", "instance_id", "host", "head_host", "tls_certificate", "tls_key"), "x")
    numbers = {"rank": 0, "total_nodes": 1, "slots": 1, "head_port": 1}
    settings = NodeSettings(**fields, **numbers, value_directories=("/x",), secret_names=("HF_TOKEN",))
    assert NodeSettings.from_json(settings.to_json()) == settings


def test_packets_do_not_show_values() -> None:
    values = SecretValues(HF_TOKEN=TOKEN)
    packet = Packet(None, None, secrets=values)  # type: ignore[arg-type]
    assert TOKEN not in f"{values} {values!r} {packet} {Mask(values.values())!r}"
    assert pickle.loads(pickle.dumps(packet)).secrets == values


class NoRunner(RunnerFactory):
    """Forks nothing: packets stay in its queue."""

    def __init__(self) -> None:
        pass

    def watch(self, pid: int, on_exit: object) -> None:
        pass

    def fork(self, descriptors: list[int], mark: bytes) -> int:
        return 0


def test_the_values_are_sent_again_after_their_packet_was_taken_back(tmp_path: Path) -> None:
    """A call is cancelled before its runner has begun it. Looks inside: the packet is taken back at one moment."""
    slot = Slot(NoRunner(), (str(tmp_path),))
    try:
        slot.furnish(SecretValues(HF_TOKEN=TOKEN))
        calls = tuple(Call(name, "f", Parcel(b""), "job") for name in "ab")
        run: Any = _BatchRun(slot, Batch("topic", calls, {"f": Parcel(b"")}), lambda _: None)
        run._send()
        packets = [pickle.loads(slot.take.recv(1 << 20)) for _ in calls]
        assert [packet.secrets for packet in packets] == [{"HF_TOKEN": TOKEN}, None]
        for packet in packets:
            slot.send.send(pickle.dumps(packet))
        run._waiting.extend(run._take_back())
        run._send()
        assert pickle.loads(slot.take.recv(1 << 20)).secrets == {"HF_TOKEN": TOKEN}
    finally:
        slot.close()
