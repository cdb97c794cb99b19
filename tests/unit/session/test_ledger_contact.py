"""When the ledger was out of reach: other processes may take some time to renew their rows then."""

import pytest

from skyward_core.session.ledger_contact import RENEW_SECONDS, Gap, LedgerContact


def contact(*answers: float) -> LedgerContact:
    """A process that renews its row every five seconds, and got these answers."""
    it = LedgerContact(5.0)
    for at in answers:
        it.answered(at)
    return it


@pytest.mark.parametrize(
    ("answers", "now", "expected"),
    [
        ((), 1000.0, None),
        ((100.0,), 110.0, None),
        ((100.0,), 111.0, Gap(100.0, 111.0)),
        ((100.0, 105.0, 115.0), 116.0, None),
        ((100.0, 105.0, 116.0), 116.0, Gap(105.0, 116.0)),
        ((100.0, 105.0, *range(116, 142, 5)), 115.0 + RENEW_SECONDS, Gap(105.0, 116.0)),
        ((100.0, 105.0, *range(116, 142, 5)), 116.0 + RENEW_SECONDS, None),
        ((100.0, 120.0, 125.0, 150.0), 151.0, Gap(100.0, 150.0)),
        ((100.0, 120.0, *range(125, 156, 5), 180.0), 181.0, Gap(155.0, 180.0)),
        ((100.0, 200.0, 150.0), 201.0, Gap(100.0, 200.0)),
    ],
)
def test_the_gap_after_which_others_may_not_have_renewed(
    answers: tuple[float, ...], now: float, expected: Gap | None
) -> None:
    """A second gap soon after the first belongs to it: a process may have had no chance in between."""
    assert contact(*answers).gap(now) == expected
