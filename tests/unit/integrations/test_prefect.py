"""The Prefect plugin without a server: the runner as a value, blocks, `prefect_context=True`, and the report's pages."""

import logging
import math
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args
from uuid import UUID, uuid4

import cloudpickle
import httpx
import pytest

pytest.importorskip("prefect")


from prefect import flow, get_run_logger, runtime, task
from prefect.blocks.core import Block, InvalidBlockRegistration
from prefect.client.schemas.objects import TaskRun
from prefect.exceptions import MissingContextError
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from prefect.states import Cancelling, Running
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.testing.standard_test_suites import BlockStandardTestSuite

import skyward_core as sky
from prefect_skyward import (
    SkywardCredentials,
    SkywardTaskRunner,
    blocks,
    cancellation,
    on_skyward,
    pool_life,
    refuse_old_prefect,
    remote_call,
    waiting_state,
)
from prefect_skyward.nested_runs import has_died, left_by
from prefect_skyward.node_objects import (
    packing,
    portable,
    raise_if_prefect_s_api_was_used,
)
from prefect_skyward.options import changed
from prefect_skyward.pool_life import PoolLife
from prefect_skyward.prefect_context import (
    NO_API,
    env_of_calls,
    in_prefect_s_context,
    keys_of_prefect,
    refuse_without_prefect,
    with_prefect_s_api,
    without_prefect_s_api,
)
from prefect_skyward.report import flow_trend, notices, pages, prefect_api
from prefect_skyward.report.flow_trend import RunFigures
from prefect_skyward.report.pages import RunState
from prefect_skyward.report.pool_state import PoolState, SharedPool
from prefect_skyward.report.prefect_api import RunApi
from prefect_skyward.report.task_costs import TaskCosts
from prefect_skyward.ui import RunLog
from prefect_skyward.waiting_state import waiting_for_machines
from skyward_core.events.utilisation import MOST_POINTS, Series
from skyward_core.serialization import sources

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults

KEY = "pnu_0123456789abcdef_of_a_test"
HERE = "http://127.0.0.1:4200/api"
SECRET = "s3cr3t-0123456789"


def local(**keywords: Any) -> sky.PoolSpec:
    return sky.PoolSpec.of(provider=sky.Local(), **keywords)


# ── the runner as a value ────────────────────────────────────────────────────────────────────────────────────────────


def test_runners_compare_by_their_spec() -> None:
    """Equality, `duplicate` and pickling use only the spec."""
    one = SkywardTaskRunner(nodes=2, provider=sky.Local(price_per_hour=1.2))
    assert one == SkywardTaskRunner(spec=sky.PoolSpec.of(nodes=2, provider=sky.Local(price_per_hour=1.2)))
    assert one != SkywardTaskRunner(nodes=3, provider=sky.Local(price_per_hour=1.2))
    assert one != "something else"
    assert one.duplicate() == one
    assert one.duplicate() is not one
    assert pickle.loads(pickle.dumps(one)) == one
    assert cloudpickle.loads(cloudpickle.dumps(one)).spec == one.spec
    assert one.name == "skyward"
    assert flow(task_runner=SkywardTaskRunner)(lambda: None).task_runner == SkywardTaskRunner()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node": 2}, "did you mean 'nodes'"),
        ({"nodes": 0}, "nodes=0"),
        ({"memory": "32 gigs"}, "memory"),
        ({"image": sky.Image(python="3.1")}, "same minor version"),
        ({"provider": sky.Local(), "image": sky.Image(apt=["ffmpeg"])}, "apt"),
        ({"spec": sky.PoolSpec.of(nodes=2), "nodes": 3}, "not both"),
    ],
)
def test_wrong_keywords_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    """A flow file with a wrong keyword fails when it is imported, and the error says what to write instead."""
    with pytest.raises(sky.BadRequest, match=message):
        SkywardTaskRunner(**options)


def test_credentials_on_a_provider_stay_with_the_runner() -> None:
    """It is duplicated for each flow run, and may be pickled."""
    one = SkywardTaskRunner(provider=sky.RunPod(api_key=SECRET))
    for again in (one.duplicate(), pickle.loads(pickle.dumps(one))):
        assert again.spec.provider.api_key.get_secret_value() == SECRET
    assert changed(one.spec, {"nodes": 2}).provider == one.spec.provider


def test_the_name_for_keep_warm_may_come_from_a_step() -> None:
    """With a provider the runner makes a pool, to check it, and it has no name then."""
    base = SkywardTaskRunner(keep_warm=60, provider=sky.Local()).spec
    named = changed(base, {"name": "exp 1+2"})
    assert (named.name, named.keep_warm) == (sky.PoolSpec.of(name="exp 1+2").name, 60)
    assert sky.ComputePool.from_spec(named).spec == named
    with pytest.raises(sky.BadRequest, match="keep_warm needs a name"):
        sky.ComputePool.from_spec(changed(base, {"nodes": 2}))


@pytest.mark.parametrize("run_count", [1, 2])
@pytest.mark.parametrize("end", ["was open", "opens", "fails"])
def test_a_task_run_is_pending_while_its_machines_are_rented(
    end: str, run_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs again when they are there, and its first attempt begins then. A failure is for the engine to set."""
    sent: list[Any] = []
    monkeypatch.setattr(waiting_state, "emit_task_run_state_change_event", lambda **event: sent.append(event))
    began = Running()
    run = TaskRun(task_key="t", dynamic_key="0", state=began, run_count=run_count, start_time=began.timestamp)
    context = SimpleNamespace(get=lambda: SimpleNamespace(task_run=run))
    monkeypatch.setattr(waiting_state, "TaskRunContext", context)
    life = PoolLife(local(nodes=2), SimpleNamespace(work=sky.Work()), "")  # type: ignore[arg-type]
    if end == "was open":
        life.opened.set_result(None)  # type: ignore[arg-type]
    with pytest.raises(LookupError) if end == "fails" else nullcontext(), waiting_for_machines(life):
        during = run.state
        if end == "fails":
            raise LookupError
    names = {"was open": [], "opens": ["WaitingForMachines", "Running"], "fails": ["WaitingForMachines"]}[end]
    assert [event["validated_state"].name for event in sent] == names
    assert [event["initial_state"] for event in sent] == [began, during][: len(names)]
    assert during is (began if end == "was open" else sent[0]["validated_state"])
    if end != "was open":
        assert during.type.value == "PENDING"
        assert during.message.startswith("waiting for machines: the pool (2 x machine) is being opened; ")
    begins_anew = end == "opens" and run_count == 1
    assert run.start_time == (run.state.timestamp if begins_anew else began.timestamp)
    assert run.run_count == run_count


def test_a_message_that_takes_long_holds_no_other_task_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others begin and end meanwhile, and hear nothing after their end. Its own task run waits for it."""
    monkeypatch.setattr(pool_life, "UPDATE_SECONDS", -1.0)
    life = PoolLife(local(), SimpleNamespace(work=sky.Work()), "")  # type: ignore[arg-type]
    heard: list[str] = []

    def say(why: str) -> None:
        heard.append(f"slow {why}")
        if not why:
            return
        other.close()
        with life.waiting_message(lambda why: heard.append(f"new {why}")):
            heard.append("end of the new one")

    with ExitStack() as other, life.waiting_message(say):
        other.enter_context(life.waiting_message(lambda why: heard.append(f"other {why}")))
        life._note_reason(sky.InstanceLaunching(2, "p4d", "aws"))
        life.update_waiting_messages()
    assert heard[:2] == ["slow ", "other "]
    assert [words.partition(" ")[0] for words in heard[2:]] == ["slow", "new", "end"]


def test_those_who_wait_for_machines_learn_why_and_are_told_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the first reason, and some the next ones: each is an event, and a thousand may wait."""
    life = PoolLife(local(), SimpleNamespace(work=sky.Work()), "")  # type: ignore[arg-type]
    heard = [list[str]() for _ in range(pool_life.MOST_UPDATED + 1)]
    with ExitStack() as waiting:
        for one in heard:
            waiting.enter_context(life.waiting_message(one.append))
        life._note_reason(
            sky.CandidateRefused(
                "aws", "eu-1", "p5", spot=False, error="NoCapacity", code="", message="none is left", seconds=0.5
            )
        )
        life.update_waiting_messages()
        life._note_reason(sky.InstanceLaunching(2, "p4d", "aws"))
        life.update_waiting_messages()  # it is too early
        assert heard[0] == ["", "aws/eu-1 p5: NoCapacity after 0.5 s: none is left"]
        monkeypatch.setattr(pool_life, "UPDATE_SECONDS", 0.0)
        for _ in range(2):
            life.update_waiting_messages()
    life._note_reason(sky.InstanceLaunching(1, "p4d", "aws"))
    life.update_waiting_messages()  # nobody waits any more
    assert heard[0][2:] == heard[-2][2:] == ["launching 2 x p4d on aws"]
    assert heard[-1] == [""]


@pytest.mark.parametrize(("found", "is_refused"), [("3.5.9", True), ("2.20", True), ("3.6.0", False), ("4.0", False)])
def test_an_old_prefect_is_refused(found: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ImportError, match=r"needs Prefect 3\.6 or newer"):
            refuse_old_prefect(found)
    else:
        assert refuse_old_prefect(found) is None


@task
def one() -> int:
    return 1


def test_a_runner_that_is_not_started_has_no_pool() -> None:
    """Outside a flow and a `with` block."""
    with pytest.raises(RuntimeError, match="not started"):
        SkywardTaskRunner().submit(one, {})


def test_on_skyward_beneath_task_only() -> None:
    with pytest.raises(TypeError, match="write @task above @on_skyward"):
        on_skyward(nodes=2)(one)
    with pytest.raises(sky.BadRequest, match="did you mean 'nodes'"):
        on_skyward(node=2)


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


BLOCKS = [
    blocks.SkywardPool,
    blocks.SkywardAWSCredentials,
    blocks.SkywardDigitalOceanCredentials,
    blocks.SkywardRunPodCredentials,
    blocks.SkywardVastAICredentials,
    blocks.SkywardVerdaCredentials,
]


@pytest.mark.parametrize("block", BLOCKS)
class TestStandardSuite(BlockStandardTestSuite):
    """Prefect's own suite for blocks. There is no logo, because the project has no address for one."""

    @pytest.fixture
    def block(self, block: type[Block]) -> type[Block]:
        return block

    test_has_a_valid_image = None


@pytest.mark.parametrize("kind", BLOCKS[1:])
def test_credentials_become_the_provider_and_are_shown_nowhere(kind: Any) -> None:
    """Every field is the provider's own, and a secret; repr and JSON of the provider have none."""
    credentials = kind(**dict.fromkeys(kind.model_fields, SECRET))
    provider = credentials.get_client()
    assert provider.name == credentials.cloud
    for name in kind.model_fields:
        assert getattr(provider, name).get_secret_value() == SECRET
    spec = blocks.SkywardPool(credentials=credentials).get_spec()
    assert spec.providers == (provider,)
    assert SECRET not in repr(credentials) + repr(provider) + spec.model_dump_json() + repr(spec)


def test_the_credentials_of_all_clouds_are_of_one_kind_that_has_no_form() -> None:
    assert all(issubclass(kind, SkywardCredentials) for kind in BLOCKS[1:])
    with pytest.raises(InvalidBlockRegistration):
        SkywardCredentials.register_type_and_schema(_sync=True)


def test_a_pool_s_fields_become_its_spec() -> None:
    block = blocks.SkywardPool(
        provider="local",
        provider_options={"price_per_hour": 1.5},
        accelerator="2 x A100",
        nodes=1,
        most_nodes=4,
        pip=["numpy"],
        env={"A": "b"},
        secrets={"HF_TOKEN": "hf-token"},
        max_cost=5,
        max_hourly_cost=3,
        spot="never",
        name="team-gpu",
        keep_warm=60,
        more={"concurrency": 2},
    )
    assert block.get_spec() == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=1.5),
        accelerator="2 x A100",
        nodes=(1, 4),
        image=sky.Image(pip=("numpy",)),
        env={"A": "b"},
        secrets={"HF_TOKEN": sky.Secret.from_store("hf-token")},
        max_cost=5,
        max_hourly_cost=3,
        spot="never",
        name="team-gpu",
        keep_warm=60,
        concurrency=2,
    )
    assert blocks.SkywardPool().get_spec() == sky.PoolSpec.of()
    either = blocks.SkywardPool(more={"accelerator": ["H100", {"accelerator": "A100", "provider": "aws"}]}).get_spec()
    assert either.accelerator_words == "H100 80GB, else A100 80GB on aws"
    with pytest.raises(sky.BadRequest, match="keep_warm needs a name"):
        blocks.SkywardPool(keep_warm=60).get_pool()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"more": {"node": 2}}, "did you mean 'nodes'"),
        ({"accelerator": "A1000"}, "A1000"),
        ({"provider": "aws", "credentials": blocks.SkywardRunPodCredentials(api_key=SECRET)}, "choose one cloud"),
        ({"provider": "aws", "provider_options": {"regoin": "x"}}, "region"),
        ({"provider": "runpod", "provider_options": {"api_key": SECRET}}, "SkywardRunPodCredentials"),
        ({"more": {"provider": {"name": "runpod", "api_key": SECRET}}}, "SkywardRunPodCredentials"),
        (
            {
                "credentials": blocks.SkywardRunPodCredentials(api_key=SECRET),
                "provider_options": {"api_key": SECRET},
            },
            "cannot be kept in the options of a block",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_field_s_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(sky.BadRequest, match=message):
        blocks.SkywardPool(**fields).get_spec()


# ── prefect_context: what a pool gets, and what is refused before money is spent ─────────────────────────────────────


def test_the_spec_has_the_address_and_the_names_of_the_keys_and_no_value() -> None:
    """The values are read when the pool opens."""
    login = "me:open-sesame"
    with temporary_settings({PREFECT_API_URL: HERE, PREFECT_API_KEY: KEY, PREFECT_API_AUTH_STRING: login}):
        spec = with_prefect_s_api(local(env={"A": "b"}, secrets=("HF_TOKEN",)))
        assert keys_of_prefect(spec) == {"PREFECT_API_KEY": KEY, "PREFECT_API_AUTH_STRING": login}
    assert spec.env == {"A": "b", "PREFECT_API_URL": HERE}
    assert set(spec.secrets or {}) == {"HF_TOKEN", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"}
    shown = f"{spec!r}{spec.model_dump_json()}{pickle.dumps(spec)!r}"
    assert KEY not in shown
    assert login not in shown


@pytest.mark.parametrize("in_context", [False, True])
def test_variables_of_the_settings_reach_the_nodes(in_context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of Prefect's API is added to them, and does not replace them. Those of a spec are instead of them."""
    monkeypatch.setenv("SKYWARD_ENV", '{"GREETING": "hello"}')
    with temporary_settings({PREFECT_API_URL: HERE}):
        specs = [local(), local(env={"A": "b"})]
        changed = [with_prefect_s_api(spec) if in_context else without_prefect_s_api(spec) for spec in specs]
    address = HERE if in_context else NO_API
    assert [spec.env for spec in changed] == [
        {"GREETING": "hello", "PREFECT_API_URL": address},
        {"A": "b", "PREFECT_API_URL": address},
    ]


@pytest.mark.parametrize("in_context", [False, True])
def test_the_settings_of_a_pool_with_a_name_are_those_of_a_program_beside_prefect(in_context: bool) -> None:
    """So both may use it; each call has the address. One that a user has given is the pool's, and has precedence."""
    given, other = local(name="team"), local(name="team", env={"PREFECT_API_URL": "http://there/api"})
    with temporary_settings({PREFECT_API_URL: HERE}):
        for spec, address in ((given, HERE if in_context else NO_API), (other, None), (local(), None)):
            whole = with_prefect_s_api(spec) if in_context else without_prefect_s_api(spec)
            assert (whole == spec) is (spec.name is not None)
            assert env_of_calls(whole, in_prefect_s_context=in_context).get("PREFECT_API_URL") == address


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError(f"no connection to {NO_API}/variables/"),
        AttributeError("'function' object has no attribute 'submit'"),
        MissingContextError("There is no active flow or task run context."),
        ModuleNotFoundError("No module named 'prefect'", name="prefect"),
        ModuleNotFoundError("No module named 'prefect.runtime'", name="prefect.runtime"),
    ],
    ids=["the API", "a nested submit", "a run logger", "no Prefect", "no module of Prefect"],
)
def test_what_needs_prefect_in_a_function_names_both_remedies(error: Exception) -> None:
    """In the flow, or in Prefect's context; the error of the function stays the cause."""
    with pytest.raises(sky.BadRequest, match=r"(?s)flow.*SkywardTaskRunner\(prefect_context=True\)") as found:
        raise_if_prefect_s_api_was_used(error)
    assert found.value.__cause__ is error
    raise_if_prefect_s_api_was_used(ModuleNotFoundError("No module named 'torch'", name="torch"))


def test_an_address_with_a_login_is_a_secret() -> None:
    with temporary_settings({PREFECT_API_URL: "https://me:word-of-mine@prefect.example/api"}):
        spec = with_prefect_s_api(local())
        assert keys_of_prefect(spec) == {"PREFECT_API_URL": "https://me:word-of-mine@prefect.example/api"}
    assert "word-of-mine" not in f"{spec!r}{spec.model_dump_json()}{pickle.dumps(spec)!r}"


def test_what_the_user_gives_has_precedence() -> None:
    """An address that only the nodes see, a key of their own."""
    with temporary_settings({PREFECT_API_URL: HERE, PREFECT_API_KEY: KEY}):
        given = local(
            env={"PREFECT_API_URL": "http://10.0.0.5/api"}, secrets={"PREFECT_API_KEY": sky.Secret.from_env("X")}
        )
        spec = with_prefect_s_api(given)
        assert keys_of_prefect(spec) == {}
    assert spec.env == {"PREFECT_API_URL": "http://10.0.0.5/api"}
    assert spec.secrets == given.secrets


@pytest.mark.parametrize(
    ("image", "is_refused"),
    [
        (sky.Image(), True),
        (sky.Image(pip=["torch", "prefectish"]), True),
        (sky.Image(pip=["torch", "Prefect>=3.6"]), False),
        (sky.Image(pip=["prefect-dask"]), False),
        (sky.Image(lock=f"prefect==3.7.7 --hash=sha256:{'0' * 64}\n"), False),
    ],
    ids=["bare", "others", "prefect", "collection", "lock"],
)
def test_nodes_without_prefect_are_refused_where_the_runner_is_made(image: sky.Image, is_refused: bool) -> None:
    """On this machine a bare image has the interpreter of the flow, and so its Prefect."""
    keywords: dict[str, Any] = {"provider": sky.AWS(region="us-east-1"), "image": image, "prefect_context": True}
    if is_refused:
        with pytest.raises(sky.BadRequest, match=r'Image\(pip=\["prefect==3'):
            SkywardTaskRunner(**keywords)
    else:
        SkywardTaskRunner(**keywords)
    refuse_without_prefect(local())


def test_an_api_that_nodes_cannot_reach_is_refused_before_money_is_spent() -> None:
    far = sky.PoolSpec.of(provider=sky.AWS(region="us-east-1"), image=sky.Image(pip=["prefect"]))
    with temporary_settings({PREFECT_API_URL: HERE}):
        with pytest.raises(sky.BadRequest, match="an address of this machine only"):
            with_prefect_s_api(far)
        assert with_prefect_s_api(far.with_(env={"PREFECT_API_URL": HERE})).env == {"PREFECT_API_URL": HERE}
    with temporary_settings({PREFECT_API_URL: "https://prefect.example/api"}):
        assert with_prefect_s_api(far).env == {"PREFECT_API_URL": "https://prefect.example/api"}
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(sky.BadRequest, match="outside of a flow"),
    ):
        with_prefect_s_api(local())


def test_a_runner_keeps_the_keyword_and_holds_no_key() -> None:
    with temporary_settings({PREFECT_API_URL: HERE, PREFECT_API_KEY: KEY}):
        one = SkywardTaskRunner(provider=sky.Local(), prefect_context=True)
        assert one.duplicate() == one != SkywardTaskRunner(provider=sky.Local())
        assert pickle.loads(pickle.dumps(one)) == one
        assert KEY.encode() not in pickle.dumps(one)


def test_a_node_with_another_prefect_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function travels by value: nodes have no `prefect_skyward`."""
    monkeypatch.setattr("prefect_skyward.prefect_context.version", lambda _: "99.1.0")
    data = sources.pack(in_prefect_s_context(len)).data
    for name in [name for name in sys.modules if name.startswith("prefect_skyward")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(sky.BadRequest, match=r'has Prefect 99.1.0, and the node has 3.*pip=\["prefect==99.1.0"'):
        sources.unpack(data).value("{}", (), {})


def test_prefect_s_objects_travel_as_themselves_in_its_context_only() -> None:
    @task
    @on_skyward(nodes=2)
    def child() -> int:
        return 1

    plain = portable(child)
    assert plain() == 1
    assert portable(get_run_logger) is not NotImplemented
    with packing(in_prefect_s_context=True):
        assert portable(child) is NotImplemented
        assert portable(child.fn) is plain
        assert portable(get_run_logger) is NotImplemented
        assert portable(runtime) is NotImplemented
        assert type(portable(SkywardTaskRunner(provider=sky.Local()))) is ThreadPoolTaskRunner
    with pytest.raises(sky.BadRequest, match="prefect_context=True"):
        portable(runtime).flow_run


def test_a_function_of_a_group_stays_one_in_prefect_s_context() -> None:
    def train() -> None: ...

    train.forms_group = True  # type: ignore[attr-defined]
    assert in_prefect_s_context(train).forms_group  # type: ignore[attr-defined]


def test_task_runs_below_a_call_whose_process_has_died_are_found() -> None:
    """Also those below them. A function that raises has ended its own; those of other calls are left alone."""

    def run(parent: UUID) -> Any:
        return SimpleNamespace(id=uuid4(), task_inputs={"__parents__": [SimpleNamespace(id=parent)]})

    def ended(error: Exception | None) -> Future[Any]:
        future = Future[Any]()
        future.set_exception(error) if error is not None else future.set_result(1)
        return future

    ends = [None, ValueError("x"), sky.CallCrashed("x"), sky.NodeLost("x")]
    assert [has_died(ended(error)) for error in ends] == [False, False, True, True]
    dead, stopped, other = uuid4(), uuid4(), uuid4()
    child = run(dead)
    grandchild, of_stopped = run(child.id), run(stopped)
    runs = [grandchild, child, of_stopped, run(other), SimpleNamespace(id=uuid4(), task_inputs={})]
    assert left_by({str(dead): False, str(stopped): True}, runs) == {
        child.id: False,
        grandchild.id: False,
        of_stopped.id: True,
    }


# ── cancellation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_subflow_ends_with_the_flow_run_around_it_and_an_api_that_does_not_answer_cancels_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does another state; the next answer is read. The thread's loop runs here, without its pauses."""
    inner, outer, between = UUID(int=1), UUID(int=2), UUID(int=3)
    answers: list[Any] = [ConnectionError("503"), [Running(), Running()], [Running(), Cancelling()]]
    asked: list[set[UUID]] = []
    acted: list[int] = []
    final: list[Any] = []

    class Client:
        def read_flow_run(self, run: UUID) -> Any:
            return SimpleNamespace(id=run, state=Running(), parent_task_run_id=between if run == inner else None)

        def read_task_run(self, run: UUID) -> Any:
            return SimpleNamespace(flow_run_id={between: outer}[run])

        def read_flow_runs(self, *, flow_run_filter: Any) -> Any:
            asked.append(set(flow_run_filter.id.any_))
            if isinstance(answer := answers[len(asked) - 1], Exception):
                raise answer
            return [SimpleNamespace(state=state) for state in answer]

        def set_flow_run_state(self, run: UUID, state: Any, force: bool) -> None:
            final.append((run, state.name, force))

    threads = SimpleNamespace(
        Event=lambda: SimpleNamespace(wait=lambda _: False, is_set=lambda: False),
    )
    context = SimpleNamespace(get_or_create=lambda: nullcontext(SimpleNamespace(client=Client())))
    monkeypatch.setattr(cancellation, "threading", threads)
    monkeypatch.setattr(sky, "LoopThread", lambda _, work: SimpleNamespace(start_if_possible=lambda: work() is None))
    monkeypatch.setattr(cancellation, "SyncClientContext", context)
    monkeypatch.setattr(sky, "after_the_work", lambda what, do, say: do())  # without its thread
    log = RunLog(logging.getLogger("a flow run"), copy_context())
    watch = cancellation.Cancellation(inner, log, lambda: acted.append(len(asked)))
    assert (asked, acted) == ([{inner, outer}] * 3, [3])
    watch.settle()
    assert final == [(inner, "Cancelled", True)]


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


class BusyApi:
    """Answers as Prefect's server does while its database is locked: 503 to so many requests that write."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.answer = partial(httpx.Response, 503)
        self.slept: list[float] = []
        self.run = SimpleNamespace(tags=["of a user"], labels={})
        self.requests: list[str] = []
        self.retries: list[int] = []

    def update_flow_run_labels(self, _: UUID, labels: dict[str, Any]) -> None:
        self.take("labels")
        self.run.labels |= labels

    def take(self, what: str) -> None:
        self.requests.append(what)
        self.retries.append(PREFECT_CLIENT_MAX_RETRIES.value())
        self.refusals -= 1
        if self.refusals >= 0:
            request = httpx.Request("PATCH", HERE)
            raise httpx.HTTPStatusError("busy", request=request, response=self.answer(request=request))

    def read_flow_run(self, _: UUID) -> Any:
        return self.run

    def update_flow_run(self, _: UUID, tags: list[str]) -> None:
        self.take("tags")
        self.run.tags = tags

    def create_artifact(self, artifact: Any) -> Any:
        self.take("artifact")
        self.artifact = artifact
        return SimpleNamespace(id=UUID(int=2))

    def read_artifacts(self, **_: Any) -> list[Any]:
        made = self.artifact
        return [SimpleNamespace(id=UUID(int=2), key=made.key, data="", task_run_id=None, metadata_=made.metadata_)]


@pytest.fixture
def busy_api(monkeypatch: pytest.MonkeyPatch) -> BusyApi:
    api = BusyApi(refusals=3)
    context = SimpleNamespace(get_or_create=lambda: nullcontext(SimpleNamespace(client=api)))
    monkeypatch.setattr(prefect_api, "SyncClientContext", context)
    clock = SimpleNamespace(monotonic=lambda: sum(api.slept), sleep=api.slept.append)
    monkeypatch.setattr(prefect_api, "time", clock)
    return api


@pytest.mark.parametrize(
    "write",
    [
        lambda api: api.label({"skyward.is_final": True}),
        lambda api: api.write("skyward-cost", "markdown", "", ""),
        lambda api: api.tag("$5"),
    ],
    ids=["labels", "artifact", "tags"],
)
def test_requests_of_a_busy_server_are_tried_again_at_once(busy_api: BusyApi, write: Callable[[RunApi], None]) -> None:
    """Prefect's client would wait 2, 4 and 8 seconds."""
    write(RunApi(UUID(int=1)))
    assert busy_api.retries == [0] * 4
    assert busy_api.slept == pytest.approx([0.05, 0.075, 0.1125])


@pytest.mark.parametrize(
    ("answer", "slept"),
    [
        (partial(httpx.Response, 503), 10.0),
        (partial(httpx.Response, 429, headers={"Retry-After": "4"}), 8.0),
        (partial(httpx.Response, 429, headers={"Retry-After": "60"}), 0.0),
        (partial(httpx.Response, 422), 0.0),
    ],
    ids=["busy", "rate limit", "long rate limit", "bad request"],
)
def test_a_request_is_tried_for_ten_seconds_at_most(
    busy_api: BusyApi, answer: partial[httpx.Response], slept: float
) -> None:
    busy_api.answer, busy_api.refusals = answer, 1_000
    with pytest.raises(httpx.HTTPStatusError):
        RunApi(UUID(int=1)).tag("$5")
    assert slept - 1 < sum(busy_api.slept) <= slept


def test_a_token_that_has_expired_is_no_failure(busy_api: BusyApi) -> None:
    """The client asks for another one before the next try."""
    busy_api.answer, busy_api.refusals = (
        partial(httpx.Response, 403, text="Invalid CSRF token or client identifier."),
        1,
    )
    RunApi(UUID(int=1)).tag("$5")
    assert (busy_api.run.tags, busy_api.slept) == (["of a user", "$5"], [0.0])


def test_an_api_that_is_away_is_asked_each_second(busy_api: BusyApi) -> None:
    """Also while it starts again."""
    answers = [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), "here"]

    def ask(_: Any) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert prefect_api.asked(ask) == "here"
    assert busy_api.slept == [1.0, 1.0]


def test_an_artifact_whose_creation_had_no_answer_is_not_created_again(
    busy_api: BusyApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = busy_api.create_artifact

    def without_answer(artifact: Any) -> Any:
        create(artifact)
        raise httpx.ReadTimeout("slow")

    busy_api.refusals = 0
    monkeypatch.setattr(busy_api, "create_artifact", without_answer)
    api = RunApi(UUID(int=1))
    api.write("skyward-cost", "markdown", "", "")
    assert (busy_api.requests, api._ids["skyward-cost", None]) == (["artifact"], UUID(int=2))


def test_the_tag_of_a_run_replaces_ours_and_needs_no_label(busy_api: BusyApi) -> None:
    """Also that of a process which was killed after the artifact, before or after its tag."""
    first = RunApi(UUID(int=1))
    first.write("skyward-cost", "markdown", "", "", tag="$5")
    first.tag("$5")
    busy_api.run.tags.append("$6")  # of a user
    second = RunApi(UUID(int=1))
    second.read(["skyward-cost"])
    second.tag("$7")
    assert busy_api.run.tags == ["of a user", "$6", "$7"]
    assert "labels" not in busy_api.requests


def provisioned(node: int, price: float = 3.6, **more: object) -> sky.InstanceProvisioned:
    return sky.InstanceProvisioned(
        f"i-{node}", node, spot=False, provider="aws", instance_type="p4d", price_on_demand=price, **more
    )


def pool_of(*events: sky.SkywardEvent, at: float = 0.0) -> PoolState:
    pool = PoolState("")
    for event in events:
        pool.after(event, at)
    return pool


def test_a_series_of_any_length_has_few_points_and_exact_extremes() -> None:
    series = Series()
    for value in range(10_000):
        series.add(float(value))
    series.add(math.nan)
    line = series.sparkline()
    assert (series.count, series.text, series.least, series.greatest) == (10_000, "NaN", 0, 9_999)
    assert series.mean == pytest.approx(4999.5)
    assert MOST_POINTS / 2 <= len(line) <= MOST_POINTS + 1
    assert list(line) == sorted(line)
    assert (line[0], line[-1]) == ("▁", "█")


def use_of_a_task_run() -> sky.PoolUse:
    return sky.PoolUse(sky.ComputePool(provider=sky.Local()), sky.Work(task="train", task_run="run-1"), is_alone=False)


def reported(use: sky.PoolUse, loss: float) -> sky.CallReported:
    return sky.CallReported(0, "i-1", "call-1", 7, {"loss": loss}, 0.0, use=use.id)


def test_a_task_run_shows_what_its_last_attempt_has_reported_and_how_it_used_the_nodes() -> None:
    """A loss that is no number any more shows as NaN. A report may be faster than the note of its call."""
    tasks, first, last = TaskCosts(), use_of_a_task_run(), use_of_a_task_run()
    tasks.begin(first)
    tasks.report(reported(first, 9.0))
    assert tasks.changed == {"run-1"}
    tasks.changed.clear()
    tasks.report(reported(last, 0.5))
    assert not tasks.changed
    tasks.begin(last)
    assert tasks.changed == {"run-1"}
    last.utilisation.running(1)
    for event in (reported(last, 0.5), reported(last, math.nan), sky.Metrics("i-1", 0, 40.0, 10.0, 0.0, 0.0)):
        last.utilisation.see(event)
    run = tasks.runs["run-1"]
    (row,) = pages.task_rows([run])
    assert {"loss": "NaN", "cpu_percent_mean": 40.0, "cpu_percent_max": 40.0}.items() <= row.items()
    assert pages.task_summary(run) == "loss NaN"
    page = pages.task_page(run)
    assert "| loss | NaN | 0.5 | 0.5 |" in page
    assert "While it ran: processor 40 %, memory 10 %" in page
    assert "Step 7" in page


def test_progress_rises_from_nothing_to_a_pool_that_is_ready() -> None:
    """It never falls on the way, and names what it has reached."""
    pool = PoolState("")
    opening = [sky.InfraCreating("p-1"), sky.InfraCreated("here"), sky.InstanceLaunching(2, "p4d", "aws")]
    machines = [provisioned(0), provisioned(1), sky.BootstrapProgress("i-0", "uv")]
    seen = [pool.progress]
    for event in (*opening, *machines, sky.BootstrapCompleted("i-0"), sky.BootstrapCompleted("i-1")):
        pool.after(event, 0.0)
        seen.append(pool.progress)
    assert seen == sorted(seen)
    assert seen[1] == 0.0
    assert 85 < seen[-1] < 100
    assert pages.progress_words(pool) == "2 of 2 machines rented, 2 prepared"
    pool.after(sky.PoolReady("p-1", 2, 2, 61.4), 0.0)
    assert pool.progress == 100.0
    assert pages.progress_words(pool) == "2 x p4d ready after 1 min 1 s"


def test_the_rows_of_machines() -> None:
    """An estimate until the receipt has the cost. A lost machine costs nothing more. A console is a link."""
    pool = pool_of(sky.InstanceLaunching(1, "p4d", "aws"), provisioned(0), at=100.0)
    machine = pool.machines["i-0"]
    assert (machine.seconds_at(1100.0), machine.cost_at(1100.0)) == (1000.0, pytest.approx(1.0))
    resource = {"cloud_id": "i-0", "seconds": {"idle": 990.0}, "cost_usd": 1.25, "price_per_hour_usd": 4.5}
    pool.settle({"resources": [resource, {**resource, "cloud_id": "i-other"}]})
    assert (machine.seconds_at(9999.0), machine.cost_at(9999.0), machine.price_per_hour) == (990.0, 1.25, 4.5)
    lost = pool_of(provisioned(0))
    lost.after(sky.InstanceLost("i-0", 0, "gone"), 36.0)
    (row,) = pages.node_rows(RunState([lost]), 1000.0)
    assert (row["seconds"], row["state"]) == (36.0, "lost")
    linked = pool_of(provisioned(0, console_url="https://console.example/i-0", accelerator="A100 40GB"))
    assert "[i-0](https://console.example/i-0) (A100 40GB)" in pages.cost_page(RunState([linked]), 0.0)
    three = [pool_of(provisioned(0)), pool_of(provisioned(1), provisioned(2)), pool_of(provisioned(3))]
    assert RunState(three).hardware == "4 x p4d"


def test_the_cost_page_so_far_adds_up_with_a_line_for_the_difference() -> None:
    """The bill is that of the pool; what the estimates of the machines leave is named."""
    pool = pool_of(
        sky.InfraCreating("p-1"), provisioned(0), sky.CostUpdate(1000.0, 1.5, 3.6, 0, 1), at=0.0
    )  # the machine: 1.0
    page = pages.cost_page(RunState([pool], earlier={"p-0": 0.25}), 1000.0)
    assert "| Total so far | **$1.75** |" in page
    assert f"| {pages.BILLING_ROUNDING} |  |  | $0.5000 |" in page
    assert "| earlier attempts |  |  | $0.2500 |" in page
    assert page.endswith("`skyward receipt p-0`, `skyward receipt p-1`")
    assert pages.summary(RunState([pool])) == "$1.50 so far, $3.60 per hour · 1 x p4d · 16 min 40 s"


def test_the_share_of_a_pool_that_was_found_warm_is_the_cost_of_the_run() -> None:
    """Also beside a pool of its own; the pool's costs, buckets and final event are of all its users."""
    joined = PoolState("pool 2")
    instance = sky.Instance(
        id="i-9", provider="aws", pool_id="p-9", rank=0, state=sky.InstanceState.RUNNING, region="r",
        instance_type="g4", price_per_hour=3.6,
    )  # fmt: skip
    joined.share(SharedPool("team-gpu", "p-9", "T4", (sky.Node(instance=instance, rank=0),)), 10.0)
    final = sky.CostFinal(9.0, 100.0, 3.6, 0, 1, 0.0, {"idle": 9.0})
    joined.after(final, 20.0)
    assert notices.notice_of(final, joined) is None
    assert RunState([joined]).usd == 0
    joined.share_usd = 0.25
    joined.leave(70.0)
    state = RunState([pool_of(sky.CostUpdate(10.0, 1.0, 3.6, 0, 1)), joined], is_final=True)
    page = pages.cost_page(state, 100.0)
    assert (
        "share of pool `team-gpu` (1 x T4): the calls of this run, by the seconds of their slots |  |  | $0.2500"
        in page
    )
    assert "| **Total** |  |  | **$1.25** |" in page
    assert "What it went to" not in page
    assert pages.summary(RunState([joined], is_final=True)) == "$0.2500 · share of pool team-gpu · 1 x T4 · 1 min 0 s"
    assert pages.progress_words(joined) == "1 x T4 found warm, or in use: pool team-gpu"
    assert [row["USD"] for row in pages.node_rows(state, 100.0)] == [""]
    assert notices.share_final(joined).payload == {
        "usd": 0.25, "seconds": 60.0, "hardware": "1 x T4", "share_of": "team-gpu", "has_opened": False,
    }  # fmt: skip


def test_the_amount_of_a_run_stands_beside_the_use_of_its_accelerators_or_else_of_its_processors() -> None:
    """In what lists show, and in the tag; each machine counts by its samples."""

    def state_of(*gpus: float | None, is_final: bool = False) -> RunState:
        samples = [sky.Metrics("i-0", 0, 40.0, 10.0, 0.0, 0.0, gpu_utilization=gpu) for gpu in gpus]
        pool = pool_of(sky.CostUpdate(1000.0, 1.5, 3.6, 0, 1), sky.CallProgress(1, 0, 0), *samples)
        return RunState([pool], is_final=is_final)

    assert pages.summary(state_of(90.0, 30.0)).startswith("$1.50 so far, $3.60 per hour · accelerators 60 % · ")
    assert pages.summary(state_of(None)).startswith("$1.50 so far, $3.60 per hour · processor 40 % · ")
    assert RunState([*state_of(90.0).pools, *state_of(None).pools]).utilisation == ("accelerators", 90.0)
    live, ended = (
        pages.cost_tag(1.5, "accelerators", 60.4, is_final=False),
        pages.cost_tag(1234.5, "processor", 40.0),
    )
    assert (live, ended) == ("$1.50 so far · accelerators 60 %", "$1,234.50 · processor 40 %")


def test_the_last_runs_of_a_flow_are_a_table_with_bars() -> None:
    """The newest run comes first; the highest cost has the longest bar, and no cost is invisible."""
    newest = RunFigures("calm-fox", "http://ui/1", "Completed", "11-27 09:00", 3.0, "accelerators", 52.0)
    older = RunFigures("an-owl-of-a-long-name", "", "AwaitingConcurrencySlot", "11-26 09:00", 0.01, is_final=False)
    page = flow_trend.trend_page([newest, older])
    head, *_ = page.splitlines()
    assert head.startswith(
        "**$3.01** for the last 2 runs, $1.50 for one in the mean. The utilisation is that of the acc"
    )
    assert head.endswith("≥ is so far: the bill is not final.")
    (first, second) = page.splitlines()[-2:]
    assert first == "| 11-27 09:00 | [calm-fox](http://ui/1) | Completed | $3.00 ████ | 52 % ██ |"
    assert second.split(" | ")[1:] == ["an-owl-of-a-long-…", "AwaitingCon…", "≥ $0.0100 █", " |"]
    assert flow_trend.trend_summary([newest]) == "last run $3.00 · accelerators 52 %"
    assert flow_trend.trend_summary([older, newest]) == "last run $0.0100 so far · the last 2 runs $3.01"
    assert flow_trend.trend_page([RunFigures("free", "", "Completed", "", 0.0)]).endswith("| $0 |  |")


def test_flows_with_similar_names_have_separate_artifacts() -> None:
    ids = [UUID(int=number << 96) for number in (1, 2, 3)]
    keys = [flow_trend.key_of(name, one) for name, one in zip(("my-flow", "My flow", "日本"), ids, strict=True)]
    assert keys == ["skyward-flow-my-flow", "skyward-flow-my-flow-00000002", "skyward-flow-00000003"]


@pytest.mark.parametrize(
    ("amount", "words"),
    [(0, "$0"), (1234.5, "$1,234.50"), (0.5, "$0.5000"), (0.001234, "$0.001234"), (0.00000012, "$0.00000012")],
)
def test_no_cost_is_shown_as_zero(amount: float, words: str) -> None:
    assert pages.usd(amount) == words


def test_a_pool_that_goes_on_for_others_costs_the_run_no_more() -> None:
    """Its cost so far stays on the page; there is no final notice of it, and its rate is not the run's any more."""
    pool = pool_of(provisioned(0), sky.CostUpdate(10.0, 1.0, 3.6, 0, 1))
    assert RunState([pool]).rate_per_hour == 3.6
    left = sky.PoolLeft("p-1", 1.5, 15.0, 3.6)
    pool.after(left, 15.0)
    assert notices.notice_of(left, pool) is None
    assert (RunState([pool]).rate_per_hour, RunState([pool]).usd, pool.final) == (0, 1.5, None)


def test_notices_carry_the_money_and_are_few() -> None:
    """A budget warning has the share that is spent; of many losses the first ones are emitted, and each bill."""
    pool = pool_of(provisioned(0))
    warning = notices.notice_of(sky.BudgetWarning(8.0, 10.0, None, "80 %"), pool)
    assert warning == notices.Notice(
        "skyward.budget.warning", {"spent_usd": 8.0, "limit_usd": 10.0, "share": 0.8, "account": None, "reason": "80 %"}
    )
    assert notices.notice_of(sky.PoolStopping(), pool) is None
    sieve = notices.Sieve()
    lost = notices.notice_of(sky.InstanceLost("i-0", 0, "gone"), pool)
    final = notices.notice_of(sky.CostFinal(1.0, 2.0, 3.0, 0, 1, 0.0), pool)
    assert lost is not None
    assert final is not None
    assert [sieve.lets(lost) for _ in range(7)] == [True] * 5 + [False] * 2
    assert all(sieve.lets(final) for _ in range(7))


def test_a_flow_run_warns_once_of_its_limit() -> None:
    """At 80 % of the sum of its pools, or when a pool warns of the same limit; a step's own limit is another one."""

    def of_pool(limit_usd: float | None, account: str | None = None) -> notices.Notice:
        found = notices.notice_of(sky.BudgetWarning(1.0, limit_usd, account, "x"), PoolState(""))
        assert found is not None
        return found

    run = notices.RunWarning()
    assert run.due(100.0) is None, "it has no limit"
    run.limit_usd = 10.0
    assert run.due(7.9) is None
    assert not run.repeats(of_pool(2.0))
    assert not run.repeats(of_pool(10.0, "team"))
    warning = run.due(8.0)
    assert warning is not None
    assert (warning.event, warning.payload["share"], warning.payload["limit_usd"]) == (notices.WARNING, 0.8, 10.0)
    assert "max_cost=10" in warning.payload["reason"]
    assert run.due(9.0) is None
    assert run.repeats(of_pool(10.0))
    assert not run.repeats(notices.Notice(notices.LOST, {}))
    other = notices.RunWarning()
    other.limit_usd = 10.0
    assert not other.repeats(of_pool(10.0))
    assert other.due(9.0) is None


def test_a_preemption_notice_has_the_time_that_is_left() -> None:
    notice = notices.notice_of(sky.PreemptionNoticed("i-0", 0, "terminate", 1000.0, 118.0), PoolState(""))
    assert notice is not None
    assert (notice.event, notice.payload["seconds_left"]) == ("skyward.preemption.noticed", 118.0)


def test_a_line_that_is_not_shown_is_at_debug_in_the_run_s_log(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(logging.getLogger("of the run"), copy_context())
    with caplog.at_level(logging.DEBUG, "of the run"):
        for node, is_shown in ((0, True), (1, False)):
            log.say_line(sky.LogLine(node, "i", "trained", 0.0, level=logging.INFO, place=node, is_shown=is_shown))
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
        (logging.INFO, "[node 0] trained"),
        (logging.DEBUG, "[node 1] trained"),
    ]


def test_the_form_of_a_pool_offers_each_provider() -> None:
    """A form needs a list that is written down."""
    missing = sorted({name.lower() for name in sky.PROVIDERS} - set(get_args(blocks.CLOUDS)))
    assert not missing, f"add {missing} to CLOUDS of integrations/prefect_skyward/blocks.py"


@pytest.mark.parametrize(
    ("error", "by_default", "by_own_condition"),
    [
        (sky.BadRequest("nodes=0"), False, True),
        (sky.CredentialsError("there is no key"), False, True),
        (sky.PoolStopped("by ada"), False, False),
        (sky.NodeLost("gone"), True, True),
    ],
)
def test_bad_input_and_credentials_are_tried_again_only_if_the_user_says_so(
    error: sky.SkywardError, by_default: bool, by_own_condition: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_call, "task_run_logger", lambda *_: logging.getLogger("test"))
    state: Any = SimpleNamespace(data=error)
    nothing: Any = None
    assert remote_call.unless_the_work_is_done(None)(nothing, nothing, state) is by_default
    assert remote_call.unless_the_work_is_done(lambda *_: True)(nothing, nothing, state) is by_own_condition
