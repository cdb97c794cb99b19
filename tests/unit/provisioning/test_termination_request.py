"""One request for the end of machines: what the answer says, and what is recorded of machines that are gone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import pytest

from skyward_core import Instance
from skyward_core.errors import InstancesLeft
from skyward_core.provisioning.termination_request import TerminationAnswer, report_gone, request_termination

PROOFS = {"a": "its processes have ended"}


class Answering:
    """A provider that answers a request with these proofs, or with an error."""

    name: ClassVar[str] = "answering"
    terminate_confirms: ClassVar[bool] = True

    def __init__(self, answer: Mapping[str, str] | Exception | None) -> None:
        self.answer = answer
        self.requests: list[list[str]] = []

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        return []

    def terminate(self, ids: Sequence[str]) -> Mapping[str, str] | None:
        self.requests.append(list(ids))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


LEFT, UNNAMED, FAILED = InstancesLeft("b is left", ["b"]), InstancesLeft("which?", []), ConnectionError("503")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, TerminationAnswer(frozenset())),
        (PROOFS, TerminationAnswer(frozenset(), PROOFS)),
        (LEFT, TerminationAnswer(frozenset({"b"}), {}, LEFT)),
        (UNNAMED, TerminationAnswer(None, {}, UNNAMED)),
        (FAILED, TerminationAnswer(None, {}, FAILED)),
    ],
    ids=["no proofs", "proofs", "one is left", "it does not say which", "an error"],
)
def test_the_answer_says_which_machines_are_not_confirmed(
    answer: Mapping[str, str] | Exception | None, expected: TerminationAnswer
) -> None:
    provider = Answering(answer)
    assert request_termination(provider, ["a", "b"]) == expected
    assert provider.requests == [["a", "b"]]


def test_no_machine_needs_no_request() -> None:
    provider = Answering(FAILED)
    assert request_termination(provider, []) == TerminationAnswer(frozenset())
    assert provider.requests == []


def test_machines_are_recorded_with_their_proofs() -> None:
    """Those with the same proof together. The evidence alone stands where there is none."""
    recorded: list[tuple[list[str], str]] = []

    def record(ids: Iterable[str], evidence: str) -> None:
        recorded.append((list(ids), evidence))

    report_gone(record, {"d", "c", "b", "a"}, "confirmed", {"a": "no files", "c": "no files", "x": "another"})
    assert recorded == [(["b", "d"], "confirmed"), (["a", "c"], "confirmed: no files")]
    report_gone(record, set(), "confirmed", {"x": "another"})
    assert len(recorded) == 2
