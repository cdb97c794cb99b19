"""Dagster: which support vector machine reads handwritten digits best? A cross-validated sweep on two nodes, and the
winner's accuracy on images it never saw.

    python flows/dagster_definitions.py             materializes both assets once
    dagster dev -f flows/dagster_definitions.py     the same with the UI: Catalog > digits_model > Metadata shows and
    plots skyward/cost_usd

Every ten minutes the schedule of `skyward_sweep` ends machines that were left running: of pools with a dead owner or an
expired lease. Turn it on under Automation.

The data, scikit-learn's 1,797 digits, is loaded on the nodes; scikit-learn is installed there, and need not be here.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import product
from statistics import mean

import dagster as dg

import skyward_core as sky
from dagster_skyward import SkywardResource

FOLDS = 5
PROVIDERS = None
"""The sweep also asks these for machines that the ledger does not know. None means the providers of the settings
(SKYWARD_PROVIDER, skyward.toml); or name them here: [sky.AWS(region="us-east-1"), sky.RunPod()].
"""


@dataclass(frozen=True)
class Candidate:
    """Hyper-parameters of a support vector machine with an RBF kernel."""

    C: float
    gamma: float


CANDIDATES = [Candidate(C, gamma) for C, gamma in product((1.0, 3.0, 10.0, 30.0), (0.0003, 0.001, 0.003))]


def digits():
    """Images for training and images for the test; the same split on every node."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def validate(candidate: Candidate, fold: int) -> float:
    """Accuracy on one fold of the training images, after training on the other folds."""
    from sklearn.model_selection import StratifiedKFold
    from sklearn.svm import SVC

    images, _, labels, _ = digits()
    learn, judge = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, labels))[fold]
    accuracy = SVC(**asdict(candidate)).fit(images[learn], labels[learn]).score(images[judge], labels[judge])
    print(f"{candidate}, fold {fold}: {accuracy:.4f}")
    return float(accuracy)


def examine(candidate: Candidate) -> float:
    """Accuracy on the test images, after training on all training images."""
    from sklearn.svm import SVC

    train_images, test_images, train_labels, test_labels = digits()
    return float(SVC(**asdict(candidate)).fit(train_images, train_labels).score(test_images, test_labels))


@dg.asset(kinds={"scikitlearn"})
def digits_candidates(
    context: dg.AssetExecutionContext, compute: SkywardResource
) -> dg.MaterializeResult[dict[Candidate, float]]:
    """Every candidate with its mean accuracy in cross-validation."""
    trials = list(product(CANDIDATES, range(FOLDS)))
    accuracies = compute.map(context, validate, *zip(*trials, strict=True))
    scores = {
        one: mean(accuracy for (candidate, _), accuracy in zip(trials, accuracies, strict=True) if candidate == one)
        for one in CANDIDATES
    }
    table = "\n".join(
        f"| {one.C:g} | {one.gamma:g} | {score:.4f} |"
        for one, score in sorted(scores.items(), key=lambda item: -item[1])
    )
    return dg.MaterializeResult(
        value=scores,
        metadata={
            "calls": len(trials),
            "best_score": max(scores.values()),
            "scores": dg.MetadataValue.md(f"| C | gamma | accuracy |\n|--|--|--|\n{table}"),
        },
    )


@dg.asset(kinds={"scikitlearn"})
def digits_model(
    context: dg.AssetExecutionContext, compute: SkywardResource, digits_candidates: dict[Candidate, float]
) -> dg.MaterializeResult[float]:
    """The best candidate's accuracy on the test images."""
    best = max(digits_candidates, key=lambda candidate: digits_candidates[candidate])
    accuracy = compute.run(context, examine, best)
    return dg.MaterializeResult(
        value=accuracy, metadata={"accuracy": accuracy, "calls": 1, "C": best.C, "gamma": best.gamma}
    )


def in_words(finding) -> str:
    """A finding of the sweep in one line."""
    return (
        f"{finding.action} {', '.join(finding.resource_ids)} of {finding.pool_id} at {finding.provider}:"
        f" {finding.reason}"
    )


@dg.op(config_schema={"is_dry_run": dg.Field(bool, default_value=False)})
def end_what_is_left_running(context: dg.OpExecutionContext) -> None:
    """Log each finding and its reason; end the machines unless it is a dry run.

    Fails if a provider could not be asked, or machines are left.
    """
    report = sky.sweep(providers=PROVIDERS, is_dry_run=context.op_config["is_dry_run"])
    for finding in report.findings:
        context.log.info("%s", in_words(finding))
    for line in report.pruned:
        context.log.info("of no use any more: %s", line)
    told = {"findings": len(report.findings), "ended": [in_words(finding) for finding in report.ended]}
    if report.failures:
        raise dg.Failure(
            "not everything could be seen or ended; the next sweep tries again: "
            + "; ".join(map(str, report.failures)),
            metadata=told,
        )
    context.add_output_metadata(told)


@dg.job
def skyward_sweep():
    end_what_is_left_running()


defs = dg.Definitions(
    assets=[digits_candidates, digits_model],
    schedules=[dg.ScheduleDefinition(job=skyward_sweep, cron_schedule="*/10 * * * *")],
    resources={
        "compute": SkywardResource(
            provider=sky.Local(price_per_hour=1.2), nodes=2, image=sky.Image(pip=["scikit-learn"])
        )
    },
    # the steps of one process share the pool; with Dagster's default each step would open its own
    executor=dg.in_process_executor,
)


def main() -> None:
    """Materialize both assets on the instance of DAGSTER_HOME, else on a temporary one, and print the results in one
    line.
    """
    started = time.monotonic()
    with dg.DagsterInstance.get() if os.environ.get("DAGSTER_HOME") else dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([digits_candidates, digits_model], resources=defs.resources, instance=instance)
    told = [
        {name: entry.value for name, entry in event.materialization.metadata.items()}
        for event in result.get_asset_materialization_events()
    ]
    report = {
        "accuracy": round(result.output_for_node("digits_model"), 4),
        "calls": sum(metadata["calls"] for metadata in told),
        "seconds": round(time.monotonic() - started, 1),
        "cost_usd": round(sum(metadata["skyward/cost_usd"] for metadata in told), 6),
    }
    print(f"digits_sweep: {json.dumps(report)}")


if __name__ == "__main__":
    main()
