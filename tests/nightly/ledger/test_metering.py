"""The bill is price times time, by a clock that the test sets; and each second has one bucket."""

import pickle

from skyward_core.worker.streams import ReportedOutcomes
from skyward_core.worker.wire import Outcome, OutcomeKind
from tests.system.ledger.test_metering import Bought, bought  # noqa: F401 - fixtures


def test_the_result_of_a_batch_replaces_lost_reports(bought: Bought) -> None:
    returned = ReportedOutcomes({"c": Outcome("c", OutcomeKind.RESULT, seconds=2.0)}, 0, bought.instance_id)
    back = pickle.loads(pickle.dumps(returned))
    assert (back.node, back.instance_id, back["c"].seconds) == (0, bought.instance_id, 2.0)
