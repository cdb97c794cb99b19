"""The contract of all clouds: `ProviderContract`. The test file of each cloud inherits it, and has two fixtures.

class TestAcme(ProviderContract):
    variables, secrets, want = ("ACME_TOKEN",), (TOKEN,), Requirements()

`cloud` is the fake, and `make` creates the provider from fields, with its credentials in the environment.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import date
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import pytest

import skyward_core as sky
from skyward_core.errors import CredentialsError, InstancesLeft, NoCapacity, ProviderFailed, SkywardError
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements, matches
from skyward_core.providers.base import (
    CREATED_TAG,
    LAUNCH_TAG,
    OWNER_TAG,
    POOL_TAG,
    PROCESS_TAG,
    RANK_TAG,
    TYPE_TAG,
    WORK_TAG,
    Provider,
    load,
)
from skyward_core.providers.tagging import work_tags
from skyward_core.work import Work
from tests.providers.http_fake import FakeCloud, Reply

POOL = "sky-contract-a1b2c3"
STARTUP = "#!/bin/sh\necho the guard, with 'quotes' and \"$SKYWARD_INSTANCE_ID\"\n"

type Make = Callable[..., Any]


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a text, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Cloud(Protocol):
    """What a test can do to any cloud. It affects the requests that follow.

    Attributes:
        is_refusing: all credentials are refused.
        is_out: all requests fail with a 5xx.
        creates_left: creating calls fail with a 5xx after this number of machines.
    """

    is_refusing: bool
    is_out: bool
    creates_left: int | None

    def alive(self) -> set[str]:
        """Return the ids of all billed machines, whatever the listing says."""
        ...

    def no_capacity(self) -> None: ...
    def quota(self) -> None: ...
    def throttle(self) -> None: ...
    def lose_create_answer(self) -> None: ...
    def recover(self) -> None: ...

    def stop(self, machine_id: str) -> None:
        """Stop a machine, power it off or outbid it: it exists, may be billed, and is unusable."""
        ...

    def preempt(self, machine_id: str) -> None: ...

    def strangers(self) -> None:
        """Add machines that are not ours, with other names, tags and labels; enough for a second page of a listing."""
        ...


def tags(pool_id: str = POOL, first_rank: int = 0, launch: str = "") -> dict[str, str]:
    """Return the tags of a pool's launch. By default the launch is the pool's first."""
    return {
        POOL_TAG: pool_id,
        RANK_TAG: str(first_rank),
        LAUNCH_TAG: launch or f"{pool_id}-1",
        OWNER_TAG: "jo@box",
        PROCESS_TAG: "4711:99/boot",
        TYPE_TAG: "any",
        CREATED_TAG: "1790000000",
    }


def cheapest(provider: Provider, want: Requirements = Requirements(), *, is_spot: bool = False) -> Offer:
    """Return the cheapest machine that fits."""
    fitting = [offer for offer in provider.offers(want) if matches(offer, want) is None and offer.is_spot == is_spot]
    return min(fitting, key=lambda offer: offer.price_per_hour)


class ProviderContract:
    """The invariants of ARCHITECTURE section 3.

    Attributes:
        want: what the fake sells, in offers of one machine.
        variables: the environment variables with credentials. The usual one is first.
        secrets: texts that may appear in no output.
        explicit: the credentials as fields of the provider.
        is_certain: whether a launch with refused credentials says that it has created nothing.
    """

    want: ClassVar[Requirements]
    variables: ClassVar[Sequence[str]]
    secrets: ClassVar[Sequence[str]]
    explicit: ClassVar[Mapping[str, Any]]
    is_certain: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _state_of_its_own(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    @pytest.fixture
    def offer(self, cloud: Cloud, make: Make) -> Offer:
        return cheapest(make(), self.want)

    def test_each_setting_is_explained(self, cloud: Cloud, make: Make) -> None:
        """The reference shows the docstring below the field, its description, or its line under "Attributes"."""
        kind = type(make())
        (body,) = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
        fields = [
            one.target.id
            for one, below in pairwise([*body, ast.Pass()])
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not is_text(below)
        ]
        listed = re.findall(r"\w+", " ".join(re.findall(r"^    +([\w, ]+): ", kind.__doc__ or "", re.MULTILINE)))
        known = {name for name in fields if name in listed or name not in kind.model_fields}
        bare = [name for name in fields if name not in known and not kind.model_fields[name].description]
        assert not bare, f"write a docstring below each of these fields, or Field(description=...): {bare}"

    # ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_offers_are_valid(self, cloud: Cloud, make: Make) -> None:
        """Prices are positive, memory and CPUs are known. An offer with chips has their name in the catalogue."""
        provider = make()
        offers = provider.offers(Requirements())
        assert offers
        for offer in offers:
            assert offer.provider == provider.name
            assert min(offer.price_per_hour, offer.vcpus, offer.memory_gb) > 0
            assert offer.region
            assert offer.architecture in {"x86_64", "arm64"}
            assert all(
                extra.name and extra.source and (extra.checked == "at launch" or date.fromisoformat(extra.checked))
                for extra in offer.extras_per_hour
            )
            assert (offer.accelerator is None) == (offer.accelerators == 0) == (offer.accelerator_memory_gb is None)
            if offer.accelerator is not None:
                assert sky.accelerators.parse(offer.accelerator).name == offer.accelerator
                assert offer.accelerator in provider.rents
            if offer.is_spot:
                assert offer.on_demand_price_per_hour is None or offer.price_per_hour <= offer.on_demand_price_per_hour
        assert len(
            {(offer.instance_type, offer.region, offer.is_spot, offer.price_per_hour) for offer in offers}
        ) == len(offers)
        assert any(matches(offer, self.want) is None for offer in offers)

    # ── launch and listing ───────────────────────────────────────────────────────────────────────────────────────────

    def test_launched_machines_are_listed(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        """A provider that is read from JSON lists the same ids, ranks, tags and prices as `launch` has returned."""
        cloud.strangers()
        strangers = cloud.alive()
        provider = make()
        launched = provider.launch(offer, 2, tags(first_rank=3), STARTUP)
        (other,) = make().launch(offer, 1, tags("sky-contract-a1b2c", launch="sky-contract-a1b2c-1"), STARTUP)
        assert [instance.rank for instance in launched] == [3, 4]
        ours = {instance.id: instance.rank for instance in launched}
        another = load(json.loads(json.dumps(provider.to_json())))
        listed = another.instances(POOL)
        assert {instance.id: instance.rank for instance in listed} == ours
        assert {instance.id for instance in another.instances()} == {*ours, other.id}
        assert cloud.alive() == strangers | {*ours, other.id}
        for instance in (*launched, *listed):
            assert instance.pool_id == POOL
            assert instance.provider == provider.name
            assert instance.state in (InstanceState.PENDING, InstanceState.RUNNING)
            assert (instance.instance_type, instance.region) == (offer.instance_type, offer.region)
            assert not instance.is_spot
            assert instance.price_per_hour == pytest.approx(offer.price_per_hour)
            assert {name: instance.tags.get(name) for name in tags()} == {**tags(), RANK_TAG: str(instance.rank)}

    def test_machines_with_unusual_names_of_work_are_found(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        """The names have the greatest length and unusual characters. The tags that identify the machine stay."""
        long = Work(*("Ünï/code_run: 2026-11-22T07:00:00+00:00 " * 20 for _ in fields(Work)))
        wanted = work_tags(long) | tags()
        (launched,) = make().launch(offer, 1, {**work_tags(long), **tags()}, STARTUP)
        (listed,) = make().instances(POOL)
        for instance in (launched, listed):
            assert {name: instance.tags.get(name) for name in tags()} == tags()
            labels = {name: value for name, value in instance.tags.items() if name.startswith(WORK_TAG.rstrip("-"))}
            assert labels
            assert all(wanted.get(name, value) == value and "code" in value for name, value in labels.items())

    @pytest.mark.parametrize(("trouble", "kind"), [("no_capacity", NoCapacity), ("quota", sky.QuotaExceeded)])
    def test_a_refusal_has_the_clouds_code_and_leaves_no_machine(
        self, cloud: Cloud, make: Make, offer: Offer, trouble: str, kind: type[SkywardError]
    ) -> None:
        getattr(cloud, trouble)()
        with pytest.raises(kind) as caught:
            make().launch(offer, 1, tags(), STARTUP)
        assert isinstance(caught.value, sky.QuotaExceeded) == (trouble == "quota")
        assert caught.value.code
        assert cloud.alive() == set()

    def test_a_refused_launch_says_whether_it_left_nothing(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        """A pool then raises the refusal at once: it need not wait until a listing would show a machine. A lost answer
        is no refusal.
        """
        provider = make()
        cloud.is_refusing = True
        with pytest.raises(CredentialsError) as refused:
            provider.launch(offer, 1, tags(), STARTUP)
        cloud.is_refusing = False
        cloud.creates_left = 0
        with pytest.raises(SkywardError) as unsure:
            provider.launch(offer, 1, tags(launch=f"{POOL}-2"), STARTUP)
        assert (refused.value.left_nothing, unsure.value.left_nothing) == (self.is_certain, False)
        assert cloud.alive() == set()

    def test_another_launch_of_a_rank_is_another_machine(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        """The tokens of a pool have a common prefix. If the answer to a replacement is lost, the earlier machine is not
        mistaken for it.
        """
        provider = make()
        (first,) = provider.launch(offer, 1, tags(launch=f"{POOL}-1"), STARTUP)
        cloud.lose_create_answer()
        try:
            found = [instance.id for instance in provider.launch(offer, 1, tags(launch=f"{POOL}-2"), STARTUP)]
        except ProviderFailed:
            found = []
        assert first.id not in found
        assert len(cloud.alive()) == 2
        assert {instance.tags[LAUNCH_TAG] for instance in provider.instances(POOL)} == {f"{POOL}-1", f"{POOL}-2"}

    def test_machines_of_a_partial_launch_can_be_found_and_terminated(
        self, cloud: Cloud, make: Make, offer: Offer
    ) -> None:
        """After a failure behind the first machine, `launch` returns fewer machines or raises an error."""
        cloud.creates_left = 1
        provider = make()
        launched: Sequence[Instance] | None = None
        try:
            launched = provider.launch(offer, 3, tags(), STARTUP)
        except (ProviderFailed, NoCapacity):
            pass
        listed = {instance.id for instance in provider.instances(POOL)}
        assert listed == cloud.alive()
        assert launched is None or {instance.id for instance in launched} == listed
        cloud.recover()
        provider.terminate(sorted(listed))
        assert cloud.alive() == set()

    def test_an_outage_is_not_an_empty_listing(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        """No method returns an empty result, and no method assumes that a request took effect."""
        provider = make()
        (instance,) = provider.launch(offer, 1, tags(), STARTUP)
        cloud.is_out = True
        for verb in (lambda: provider.offers(self.want), lambda: provider.instances(POOL), provider.instances):
            with pytest.raises(ProviderFailed):
                verb()
        with pytest.raises((ProviderFailed, InstancesLeft)):
            provider.terminate([instance.id])
        cloud.recover()
        assert cloud.alive() == {instance.id}
        assert [found.id for found in provider.instances(POOL)] == [instance.id]

    def test_a_preempted_or_stopped_machine_is_not_listed_as_running(
        self, cloud: Cloud, make: Make, offer: Offer
    ) -> None:
        """The pool replaces it. A stopped machine, billed or not, is listed until it is terminated."""
        provider = make()
        preempted, stopped, runs = provider.launch(offer, 3, tags(), STARTUP)
        cloud.preempt(preempted.id)
        cloud.stop(stopped.id)
        states = {instance.id: instance.state for instance in provider.instances(POOL)}
        assert states.get(preempted.id) in (None, InstanceState.STOPPING)
        assert states.get(stopped.id) is InstanceState.STOPPING
        assert states[runs.id] in (InstanceState.PENDING, InstanceState.RUNNING)
        provider.terminate([preempted.id, stopped.id, runs.id])
        assert cloud.alive() == set()

    def test_throttled_requests_are_repeated(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        cloud.throttle()
        assert make().instances(POOL) == []

    # ── terminate ────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_terminate_ends_only_the_given_machines_and_may_be_repeated(
        self, cloud: Cloud, make: Make, offer: Offer
    ) -> None:
        """Ids that are gone, ids that never existed, and an empty list are no errors."""
        cloud.strangers()
        strangers = cloud.alive()
        provider = make()
        first, second = (instance.id for instance in provider.launch(offer, 2, tags(), STARTUP))
        never = first[:-3] + ("999" if first[-3:] != "999" else "111")
        provider.terminate([first, never])
        assert cloud.alive() == strangers | {second}
        provider.terminate([first, second, never])
        provider.terminate([first, second])
        provider.terminate([])
        assert cloud.alive() == strangers
        assert all(instance.state is InstanceState.STOPPING for instance in provider.instances(POOL))

    def test_an_id_that_is_none_ends_nothing_and_is_no_path(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        """Ids come from the ledger, which many may write: another part of the account must not be reached by one."""
        provider = make()
        (mine,) = provider.launch(offer, 1, tags(), STARTUP)
        living = cloud.alive()
        for text in (
            f"../{mine.id}",
            f"x/../{mine.id}",
            f"{mine.id}?x=1",
            f"{mine.id}/",
            "..",
            "",
            f"%2e%2e/{mine.id}",
        ):
            with suppress(SkywardError):  # a cloud may say that there is none
                provider.terminate([text])
            assert cloud.alive() == living, text

    # ── credentials ──────────────────────────────────────────────────────────────────────────────────────────────────

    def test_refused_credentials_are_credentials_error(self, cloud: Cloud, make: Make, offer: Offer) -> None:
        """It holds for every method."""
        provider = make()
        cloud.is_refusing = True
        for verb in (
            lambda: provider.launch(offer, 1, tags(), STARTUP),
            lambda: provider.instances(POOL),
            lambda: provider.terminate(["1234567890"]),
            provider.account,
        ):
            with pytest.raises(CredentialsError):
                verb()
        assert cloud.alive() == set()

    def test_without_credentials_the_error_names_the_variable(
        self, cloud: Cloud, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        """Neither a variable nor a file has credentials."""
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        for variable in self.variables:
            monkeypatch.delenv(variable, raising=False)
        with pytest.raises(CredentialsError, match=self.variables[0]):
            make().instances(POOL)

    def test_no_secret_appears_in_any_output(
        self,
        cloud: Cloud,
        make: Make,
        offer: Offer,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """It holds for repr, JSON, logs, tracebacks of errors, instances and offers."""
        caplog.set_level(logging.DEBUG)
        provider = make()
        written = [repr(provider), str(provider), json.dumps(provider.to_json()), repr(offer), provider.account()]
        written.append(provider.model_dump_json())
        launched = provider.launch(offer, 1, tags(), STARTUP)
        written += [repr(launched), *(instance.model_dump_json() for instance in (*launched, *provider.instances()))]
        cloud.is_refusing = True
        with pytest.raises(CredentialsError) as caught:
            provider.instances(POOL)
        written += traceback.format_exception(caught.value)
        written += [*capfd.readouterr(), caplog.text]
        assert not [text for text in written for secret in self.secrets if secret in text]

    def test_given_credentials_stay_with_the_value(self, cloud: Cloud, make: Make) -> None:
        """Explicit credentials are used, and are in no JSON. A provider that is read from that JSON takes them from the
        environment.
        """
        provider = make(**self.explicit)
        assert load(provider.to_json()).to_json() == provider.to_json()
        text = provider.model_dump_json() + repr(provider)
        assert not [secret for secret in self.secrets if secret in text]
        assert provider.account() == make().account() != ""


NO_ANSWERS = {
    "a page": Reply(200, "<html>Sign in to the hotel</html>", is_text=True),
    "an empty object": Reply(200, {}),
    "null": Reply(200, "null", is_text=True),
}
SECRET = "sk-instance-0a1b2c3d4e5f"


class RestContract(ProviderContract):
    """Further rules for the clouds behind `_http.Api`.

    Attributes:
        ending: method and path of the call that ends a machine.
        login: a path that is requested before all others, if there is one.
    """

    ending: ClassVar[tuple[str, str]]
    login: ClassVar[str] = "(?!)"
    is_certain = True

    @pytest.mark.parametrize("what", NO_ANSWERS)
    @pytest.mark.parametrize("is_let_in", [False, True])
    def test_status_200_without_valid_content_is_an_error(
        self, cloud: FakeCloud, make: Make, offer: Offer, what: str, is_let_in: bool
    ) -> None:
        """The content is a proxy's page, an object that lacks the field, or null. It contains nothing about machines,
        so every method raises ProviderFailed.
        """
        provider = make()
        (machine,) = provider.launch(offer, 1, tags(), STARTUP)
        for method in ("GET", "POST", "PUT", "DELETE"):
            cloud.fail(method, f"(?!{self.login}).*" if is_let_in else "", NO_ANSWERS[what], times=10**6)
        verbs: dict[str, Callable[[], object]] = {
            "offers": lambda: provider.offers(self.want),
            "instances": lambda: provider.instances(POOL),
            "launch": lambda: provider.launch(offer, 1, tags(launch=f"{POOL}-2"), STARTUP),
            "account": provider.account,
        }
        for name, verb in verbs.items():
            with pytest.raises(ProviderFailed):
                print(name, verb())
        if what != "null":  # this cloud answers null on success
            with pytest.raises((ProviderFailed, InstancesLeft)):
                provider.terminate([machine.id])
        cloud.faults.clear()
        assert cloud.alive() == {machine.id}

    @pytest.mark.parametrize(
        "page",
        [
            *(Reply(status, "<html>Not Found</html>", is_text=True) for status in (404, 410)),
            *(Reply(status, {"message": "no Route matched with those values"}) for status in (404, 410)),
            NO_ANSWERS["a page"],
            NO_ANSWERS["an empty object"],
        ],
        ids=lambda page: f"{page.status} {page.body}",
    )
    def test_an_unconfirmed_termination_is_an_error(
        self, cloud: FakeCloud, make: Make, offer: Offer, page: Reply
    ) -> None:
        """All other requests succeed. Only the cloud's own 404 means that a machine is gone: a proxy's page, or another
        service's JSON, contains nothing about it.
        """
        provider = make()
        (machine,) = provider.launch(offer, 1, tags(), STARTUP)
        cloud.fail(*self.ending, page, times=10**6)
        with pytest.raises((ProviderFailed, InstancesLeft)):
            provider.terminate([machine.id])
        assert cloud.alive() == {machine.id}

    @pytest.mark.parametrize("what", [*NO_ANSWERS, "a reset connection"])
    def test_a_creating_call_with_a_lost_or_invalid_answer_may_have_created_a_machine(
        self, cloud: FakeCloud, make: Make, offer: Offer, what: str
    ) -> None:
        """The machines are found, and not requested again. If no machine exists, the error is ProviderFailed and never
        NoCapacity.
        """
        provider = make()
        cloud.fail(*cloud.creating, NO_ANSWERS.get(what), is_done=True)
        assert {machine.id for machine in provider.launch(offer, 1, tags(), STARTUP)} == cloud.alive()
        assert len(cloud.alive()) == len(cloud.asked(*cloud.creating)) == 1
        cloud.fail(*cloud.creating, NO_ANSWERS.get(what))
        with pytest.raises(ProviderFailed):
            provider.launch(offer, 1, tags(launch=f"{POOL}-2"), STARTUP)
        assert len(cloud.alive()) == 1

    @pytest.mark.parametrize("status", [200, 400, 500])
    def test_a_secret_in_an_answer_is_in_no_message(
        self, cloud: FakeCloud, make: Make, offer: Offer, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The answer to a failed creating call may contain a key of the machine."""
        caplog.set_level(logging.DEBUG)
        body = {"success": False, "instance_api_key": SECRET, "machine": [{"root_password": SECRET}]}
        cloud.fail(*cloud.creating, Reply(status, body), times=99)
        with pytest.raises(SkywardError) as caught:
            make().launch(offer, 1, tags(), STARTUP)
        assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text
