"""The contract of all clouds: `ProviderContract`. Each cloud's test file inherits it and says how to change its fake.

class TestAcme(ProviderContract):
    @pytest.fixture
    def hands(self) -> Iterator[Hands]: ...
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import CredentialsError, InstancesLeft, NoCapacity, ProviderFailed, RateLimited, SkywardError
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements, matches
from skyward_core.providers import _http
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


@dataclass(frozen=True)
class Hands:
    """What a test can do to any cloud. It affects the requests that follow.

    Attributes:
        provider: creates the provider, with its credentials in the environment.
        want: what the fake sells, in offers of one machine.
        secrets: texts that may appear in no output.
        alive: the ids of all billed machines, whatever the listing says.
        refuse_credentials: from now on all credentials are refused.
        no_capacity: the next creating calls find no machine, in the cloud's own words.
        quota: the next creating calls exceed the account's limit, in the cloud's own words.
        outage, outage_over: all requests fail with a 5xx, until `outage_over`, which ends `fail_create_after` too.
        lose_create_answer: the next creating call takes effect, and its answer is lost.
        fail_create_after: creating calls fail with a 5xx after this number of machines.
        throttle: the next request is refused with the cloud's way to say "too many".
        stop: a machine is stopped, powered off or outbid: it exists, may be billed, and is unusable.
        preempt: a spot machine is preempted.
        strangers: machines that are not ours appear: same account, other names, tags and labels; enough for a second
            page of a listing.
    """

    provider: Callable[..., Provider]
    want: Requirements
    secrets: tuple[str, ...]
    alive: Callable[[], set[str]]
    refuse_credentials: Callable[[], None]
    no_capacity: Callable[[], None]
    quota: Callable[[], None]
    outage: Callable[[], None]
    outage_over: Callable[[], None]
    lose_create_answer: Callable[[], None]
    fail_create_after: Callable[[int], None]
    throttle: Callable[[], None]
    stop: Callable[[str], None]
    preempt: Callable[[str], None]
    strangers: Callable[[], None]


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


class ProviderContract:
    """The invariants of ARCHITECTURE section 3. A subclass has the fixture `hands`."""

    @pytest.fixture(autouse=True)
    def _no_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_http, "PAUSE_SECONDS", 0.001)
        monkeypatch.setattr(_http, "PATIENCE_SECONDS", 0.5)

    @pytest.fixture(autouse=True)
    def _state_of_its_own(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    @pytest.fixture
    def offer(self, hands: Hands) -> Offer:
        """Return the cheapest on-demand machine that fits."""
        offers = [
            offer
            for offer in hands.provider().offers(hands.want)
            if matches(offer, hands.want) is None and not offer.is_spot
        ]
        return min(offers, key=lambda offer: offer.price_per_hour)

    # ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_offers_are_valid(self, hands: Hands) -> None:
        """Prices are positive, memory and CPUs are known. An offer with chips has their name in the catalogue."""
        provider = hands.provider()
        offers = provider.offers(Requirements())
        assert offers
        for offer in offers:
            assert offer.provider == provider.name
            assert offer.price_per_hour > 0
            assert offer.region
            assert offer.vcpus > 0
            assert offer.memory_gb > 0
            assert offer.architecture in {"x86_64", "arm64"}
            assert all(
                extra.name and extra.source and (extra.checked == "at launch" or date.fromisoformat(extra.checked))
                for extra in offer.extras_per_hour
            )
            assert (offer.accelerator is None) == (offer.accelerators == 0) == (offer.accelerator_memory_gb is None)
            if offer.accelerator is not None:
                assert sky.accelerators.parse(offer.accelerator).name == offer.accelerator
            if offer.is_spot:
                assert offer.on_demand_price_per_hour is None or offer.price_per_hour <= offer.on_demand_price_per_hour
        assert len(
            {(offer.instance_type, offer.region, offer.is_spot, offer.price_per_hour) for offer in offers}
        ) == len(offers)
        assert any(matches(offer, hands.want) is None for offer in offers)

    # ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_launched_machines_are_listed(self, hands: Hands, offer: Offer) -> None:
        """The listing has the same ids, ranks, tags, prices, logins and directories as the result of `launch`."""
        provider = hands.provider()
        launched = provider.launch(offer, 2, tags(first_rank=3), STARTUP)
        assert [instance.rank for instance in launched] == [3, 4]
        listed = {instance.id: instance for instance in provider.instances(POOL)}
        assert sorted(listed) == sorted(instance.id for instance in launched)
        assert set(listed) == hands.alive()
        for instance in (*launched, *listed.values()):
            assert instance.pool_id == POOL
            assert instance.provider == provider.name
            assert instance.state in (InstanceState.PENDING, InstanceState.RUNNING)
            assert instance.instance_type == offer.instance_type
            assert instance.region == offer.region
            assert not instance.is_spot
            assert instance.price_per_hour == pytest.approx(offer.price_per_hour)
            assert {name: instance.tags.get(name) for name in tags()} == {**tags(), RANK_TAG: str(instance.rank)}
        assert {instance.id: instance.rank for instance in listed.values()} == {
            instance.id: instance.rank for instance in launched
        }

    def test_machines_with_unusual_names_of_work_are_found(self, hands: Hands, offer: Offer) -> None:
        """The names have the greatest length and unusual characters. The machine is listed with its work, and with the
        tags that identify it.
        """
        long = Work(*("Ünï/code_run: 2026-11-22T07:00:00+00:00 " * 20 for _ in fields(Work)))
        wanted = work_tags(long) | tags()
        (launched,) = hands.provider().launch(offer, 1, {**work_tags(long), **tags()}, STARTUP)
        (listed,) = hands.provider().instances(POOL)
        for instance in (launched, listed):
            assert {name: instance.tags.get(name) for name in tags()} == tags()
            labels = {name: value for name, value in instance.tags.items() if name.startswith(WORK_TAG.rstrip("-"))}
            assert labels
            assert all(wanted.get(name, value) == value and "code" in value for name, value in labels.items())

    def test_another_process_finds_machines_by_their_tags(self, hands: Hands, offer: Offer) -> None:
        """Without a pool id it finds the machines of all pools. It never finds machines of other users."""
        hands.strangers()
        strangers = hands.alive()
        mine = hands.provider().launch(offer, 1, tags(), STARTUP)
        others = hands.provider().launch(offer, 1, tags("sky-contract-a1b2c", launch="sky-contract-a1b2c-1"), STARTUP)
        fields = json.dumps(hands.provider().to_json())
        code = (
            "import json, sys; from skyward_core.providers.base import load\n"
            "provider = load(json.loads(sys.argv[1]))\n"
            "print(json.dumps([[i.id for i in provider.instances(p)] for p in (sys.argv[2], None)]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, fields, POOL],
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr
        of_pool, of_all = json.loads(done.stdout)
        assert of_pool == [mine[0].id]
        assert sorted(of_all) == sorted([mine[0].id, others[0].id])
        assert hands.alive() == strangers | {mine[0].id, others[0].id}

    def test_a_lack_of_capacity_is_no_capacity(self, hands: Hands, offer: Offer) -> None:
        """The error has the provider's own code, and no machine is left."""
        hands.no_capacity()
        with pytest.raises(NoCapacity) as caught:
            hands.provider().launch(offer, 1, tags(), STARTUP)
        assert not isinstance(caught.value, sky.QuotaExceeded)
        assert caught.value.code
        assert hands.alive() == set()

    def test_a_full_quota_is_quota_exceeded(self, hands: Hands, offer: Offer) -> None:
        """The error has the provider's own code, and no machine is left."""
        hands.quota()
        with pytest.raises(sky.QuotaExceeded) as caught:
            hands.provider().launch(offer, 1, tags(), STARTUP)
        assert caught.value.code
        assert hands.alive() == set()

    def test_another_launch_of_a_rank_is_another_machine(self, hands: Hands, offer: Offer) -> None:
        """The tokens of a pool have a common prefix. If the answer to a replacement is lost, the earlier machine is not
        mistaken for it.
        """
        provider = hands.provider()
        (first,) = provider.launch(offer, 1, tags(launch=f"{POOL}-1"), STARTUP)
        hands.lose_create_answer()
        try:
            found = [instance.id for instance in provider.launch(offer, 1, tags(launch=f"{POOL}-2"), STARTUP)]
        except ProviderFailed:
            found = []
        assert first.id not in found
        assert len(hands.alive()) == 2
        assert {instance.tags[LAUNCH_TAG] for instance in provider.instances(POOL)} == {f"{POOL}-1", f"{POOL}-2"}

    def test_machines_of_a_partial_launch_can_be_found_and_terminated(self, hands: Hands, offer: Offer) -> None:
        """After a failure behind the first machine, `launch` returns fewer machines or raises an error. In both cases
        all machines are listed and can be terminated.
        """
        hands.fail_create_after(1)
        provider = hands.provider()
        launched: Sequence[Instance] | None = None
        try:
            launched = provider.launch(offer, 3, tags(), STARTUP)
        except (ProviderFailed, NoCapacity):
            pass
        listed = {instance.id for instance in provider.instances(POOL)}
        assert listed == hands.alive()
        assert launched is None or {instance.id for instance in launched} == listed
        hands.outage_over()
        provider.terminate(sorted(listed))
        assert hands.alive() == set()

    # ── listing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_an_outage_is_not_an_empty_listing(self, hands: Hands, offer: Offer) -> None:
        """No method returns an empty result, and no method assumes that a request took effect."""
        provider = hands.provider()
        (instance,) = provider.launch(offer, 1, tags(), STARTUP)
        hands.outage()
        for verb in (
            lambda: provider.offers(hands.want),
            lambda: provider.instances(POOL),
            lambda: provider.instances(),
        ):
            with pytest.raises(ProviderFailed):
                verb()
        with pytest.raises((ProviderFailed, InstancesLeft)):
            provider.terminate([instance.id])
        hands.outage_over()
        assert hands.alive() == {instance.id}
        assert [found.id for found in provider.instances(POOL)] == [instance.id]

    def test_a_preempted_or_stopped_machine_is_not_listed_as_running(self, hands: Hands, offer: Offer) -> None:
        """The pool replaces it. A stopped machine, billed or not, is listed until it is terminated."""
        provider = hands.provider()
        preempted, stopped, runs = provider.launch(offer, 3, tags(), STARTUP)
        hands.preempt(preempted.id)
        hands.stop(stopped.id)
        states = {instance.id: instance.state for instance in provider.instances(POOL)}
        assert states.get(preempted.id) in (None, InstanceState.STOPPING)
        assert states.get(stopped.id) is InstanceState.STOPPING
        assert states[runs.id] in (InstanceState.PENDING, InstanceState.RUNNING)
        provider.terminate([preempted.id, stopped.id, runs.id])
        assert hands.alive() == set()

    # ── terminate ────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_terminating_a_gone_machine_is_no_error(self, hands: Hands, offer: Offer) -> None:
        """It holds for ids that are gone, for ids that never existed, and for an empty list."""
        provider = hands.provider()
        launched = provider.launch(offer, 2, tags(), STARTUP)
        ids = [instance.id for instance in launched]
        never = self.never(ids[0])
        provider.terminate([ids[0], never])
        provider.terminate([*ids, never])
        provider.terminate(ids)
        provider.terminate([])
        assert hands.alive() == set()
        assert all(instance.state is InstanceState.STOPPING for instance in provider.instances(POOL))

    def never(self, machine_id: str) -> str:
        """Return an id with the right format that no machine has."""
        return machine_id[:-3] + ("000" if machine_id[-3:] != "000" else "111")

    def test_machines_are_terminated_while_the_interpreter_ends(self, hands: Hands, offer: Offer) -> None:
        """An `atexit` callback tears down an open pool. Executors of concurrent.futures accept no work then."""
        provider = hands.provider()
        mine = [
            provider.launch(offer, 1, tags(first_rank=rank, launch=f"{POOL}-{rank + 1}"), STARTUP)[0].id
            for rank in range(3)
        ]
        code = (
            "import atexit, json, sys\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "from skyward_core.providers.base import load\n"
            "provider = load(json.loads(sys.argv[1]))\n"
            "atexit.register(lambda: print(len(provider.instances(sys.argv[2])), provider.terminate(sys.argv[3:])))\n"
        )
        fields = json.dumps(provider.to_json())
        done = subprocess.run(
            [sys.executable, "-c", code, fields, POOL, *mine],
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ),
        )
        assert done.stdout == "3 None\n", done.stderr
        assert hands.alive() == set()

    def test_terminate_does_not_affect_other_machines(self, hands: Hands, offer: Offer) -> None:
        """Only machines with the given ids end."""
        hands.strangers()
        strangers = hands.alive()
        provider = hands.provider()
        first, second = provider.launch(offer, 2, tags(), STARTUP)
        provider.terminate([first.id])
        assert hands.alive() == strangers | {second.id}

    # ── credentials ──────────────────────────────────────────────────────────────────────────────────────────────────

    def test_refused_credentials_are_credentials_error(self, hands: Hands, offer: Offer) -> None:
        """It holds for every method."""
        provider = hands.provider()
        hands.refuse_credentials()
        for verb in (
            lambda: provider.launch(offer, 1, tags(), STARTUP),
            lambda: provider.instances(POOL),
            lambda: provider.terminate(["1234567890"]),
            provider.account,
        ):
            with pytest.raises(CredentialsError):
                verb()
        assert hands.alive() == set()

    def test_without_credentials_the_error_names_the_variable(
        self, hands: Hands, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        """Neither a variable nor a file has credentials: CredentialsError is raised."""
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        provider = hands.provider()
        for variable in self.variables:
            monkeypatch.delenv(variable, raising=False)
        with pytest.raises(CredentialsError, match=self.variables[0]):
            provider.instances(POOL)

    variables: Sequence[str] = ()
    """The environment variables with its credentials. The usual one is first."""

    def test_no_secret_appears_in_any_output(
        self, hands: Hands, offer: Offer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """It holds for repr, JSON, logs, tracebacks of errors, instances and offers."""
        caplog.set_level(logging.DEBUG)
        provider = hands.provider()
        written = [
            repr(provider),
            str(provider),
            json.dumps(provider.to_json()),
            provider.model_dump_json(),
            repr(offer),
        ]
        launched = provider.launch(offer, 1, tags(), STARTUP)
        written += [repr(launched), *(instance.model_dump_json() for instance in (*launched, *provider.instances()))]
        written.append(provider.account())
        hands.refuse_credentials()
        try:
            provider.instances(POOL)
        except CredentialsError as error:
            written += [str(error), repr(error), repr(error.__cause__)]
        out, err = capfd.readouterr()
        written += [out, err, caplog.text]
        assert hands.secrets
        for secret in hands.secrets:
            assert not [text for text in written if secret in text]

    def test_given_credentials_stay_with_the_value(self, hands: Hands) -> None:
        """Explicit credentials are used, and are in no JSON. A provider that is read from that JSON takes them from the
        environment.
        """
        provider = hands.provider(explicit=True)
        assert load(provider.to_json()).to_json() == provider.to_json()
        text = provider.model_dump_json() + repr(provider)
        assert not [secret for secret in hands.secrets if secret in text]
        assert provider.account() == hands.provider().account() != ""

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_throttled_requests_are_repeated(self, hands: Hands, offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
        """A single refusal causes no error. Endless refusals cause RateLimited."""
        monkeypatch.setattr(_http, "PATIENCE_SECONDS", 60.0)  # the refusal itself takes some time on a busy machine
        hands.throttle()
        assert hands.provider().instances(POOL) == []


NO_ANSWERS = {
    "a page": Reply(200, "<html>Sign in to the hotel</html>", is_text=True),
    "an empty object": Reply(200, {}),
    "null": Reply(200, "null", is_text=True),
}
SECRET = "sk-instance-0a1b2c3d4e5f"


class RestContract(ProviderContract):
    """Further rules for the clouds behind `_http.Api`.

    A subclass has the fixture `wire`, the fake's server, and names its calls.

    Attributes:
        creating: method and path of the creating call.
        ending: the same of the call that ends a machine.
        login: a path that is requested before all others, if there is one.
    """

    creating: tuple[str, str] = ("POST", "")
    ending: tuple[str, str] = ("DELETE", "")
    login: str = "(?!)"

    @pytest.mark.parametrize("what", NO_ANSWERS)
    @pytest.mark.parametrize("is_let_in", [False, True])
    def test_status_200_without_valid_content_is_an_error(
        self, hands: Hands, wire: FakeCloud, offer: Offer, what: str, is_let_in: bool
    ) -> None:
        """The content is a proxy's page, an object that lacks the field, or null. It contains nothing about machines,
        so every method raises ProviderFailed.
        """
        provider = hands.provider()
        (machine,) = provider.launch(offer, 1, tags(), STARTUP)
        pattern = f"(?!{self.login}).*" if is_let_in else ""
        for method in ("GET", "POST", "PUT", "DELETE"):
            wire.fail(method, pattern, NO_ANSWERS[what], times=10**6)
        verbs: dict[str, Callable[[], object]] = {
            "offers": lambda: provider.offers(hands.want),
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
        wire.faults.clear()
        assert hands.alive() == {machine.id}

    @pytest.mark.parametrize("status", [404, 410])
    def test_only_the_clouds_own_404_means_that_a_machine_is_gone(
        self, hands: Hands, wire: FakeCloud, offer: Offer, status: int
    ) -> None:
        """A proxy's page, or another service's JSON, contains nothing about the machine. The machine exists."""
        provider = hands.provider()
        (machine,) = provider.launch(offer, 1, tags(), STARTUP)
        for page in (
            Reply(status, "<html>Not Found</html>", is_text=True),
            Reply(status, {"message": "no Route matched with those values"}),
            NO_ANSWERS["a page"],
            NO_ANSWERS["an empty object"],
        ):
            wire.fail(*self.ending, page, times=10**6)
            with pytest.raises((ProviderFailed, InstancesLeft)):
                provider.terminate([machine.id])
            wire.faults.clear()
        assert hands.alive() == {machine.id}

    @pytest.mark.parametrize("what", NO_ANSWERS)
    def test_a_creating_call_with_an_invalid_answer_may_have_created_a_machine(
        self, hands: Hands, wire: FakeCloud, offer: Offer, what: str
    ) -> None:
        """The machine is found. If no machine exists, the error is ProviderFailed and never NoCapacity."""
        provider = hands.provider()
        wire.fail(*self.creating, NO_ANSWERS[what], is_done=True)
        assert {machine.id for machine in provider.launch(offer, 1, tags(), STARTUP)} == hands.alive()
        wire.fail(*self.creating, NO_ANSWERS[what])
        with pytest.raises(ProviderFailed):
            provider.launch(offer, 1, tags(launch=f"{POOL}-2"), STARTUP)
        assert len(hands.alive()) == 1

    @pytest.mark.parametrize("status", [200, 400, 500])
    def test_a_secret_in_an_answer_is_in_no_message(
        self, hands: Hands, wire: FakeCloud, offer: Offer, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The answer to a failed creating call may contain a key of the machine."""
        caplog.set_level(logging.DEBUG)
        body = {"success": False, "instance_api_key": SECRET, "machine": [{"root_password": SECRET}]}
        wire.fail(*self.creating, Reply(status, body), times=99)
        with pytest.raises(SkywardError) as caught:
            hands.provider().launch(offer, 1, tags(), STARTUP)
        assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text


__all__ = ["POOL", "STARTUP", "Hands", "ProviderContract", "RateLimited", "RestContract", "tags"]
