"""Find the best support vector machine for handwritten digits with Dagster: a cross-validated sweep on two nodes.

The second asset is the accuracy of the best one on test images.

    python flows/dagster_definitions.py             materializes both assets once
    dagster dev -f flows/dagster_definitions.py     starts the UI: Catalog > digits_model > Metadata shows and plots
    skyward/cost_usd

The schedule of `skyward_sweep` ends machines of dead pools every ten minutes. A pool is dead if its owner is dead or
its lease has expired. Turn the schedule on under Automation.

The nodes install scikit-learn and load its 1,797 digits. This computer does not need scikit-learn.
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
"""The sweep also queries these for machines that the ledger does not have. None means the providers of the settings
(SKYWARD_PROVIDER, skyward.toml). A list is possible too: [sky.AWS(region="us-east-1"), sky.RunPod()].
"""


@dataclass(frozen=True)
class Candidate:
    """Hyper-parameters of a support vector machine with an RBF kernel."""

    C: float
    gamma: float


CANDIDATES = [Candidate(C, gamma) for C, gamma in product((1.0, 3.0, 10.0, 30.0), (0.0003, 0.001, 0.003))]


def digits():
    """Return training images, test images, training labels, test labels; the split is the same on every node."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def validate(candidate: Candidate, fold: int) -> float:
    """Train on all folds but one; return the accuracy on that fold."""
    from sklearn.model_selection import StratifiedKFold
    from sklearn.svm import SVC

    images, _, labels, _ = digits()
    train, held_out = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, labels))[fold]
    accuracy = SVC(**asdict(candidate)).fit(images[train], labels[train]).score(images[held_out], labels[held_out])
    print(f"{candidate}, fold {fold}: {accuracy:.4f}")
    return float(accuracy)


def examine(candidate: Candidate) -> float:
    """Train on all training images; return the accuracy on the test images."""
    from sklearn.svm import SVC

    train_images, test_images, train_labels, test_labels = digits()
    return float(SVC(**asdict(candidate)).fit(train_images, train_labels).score(test_images, test_labels))


@dg.asset(kinds={"scikitlearn"})
def digits_candidates(
    context: dg.AssetExecutionContext, compute: SkywardResource
) -> dg.MaterializeResult[dict[Candidate, float]]:
    """Each candidate with its mean accuracy in cross-validation."""
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


def as_line(finding) -> str:
    """Return a finding of the sweep as one line."""
    return (
        f"{finding.action} {', '.join(finding.resource_ids)} of {finding.pool_id} at {finding.provider}:"
        f" {finding.reason}"
    )


@dg.op(config_schema={"is_dry_run": dg.Field(bool, default_value=False)})
def end_what_is_left_running(context: dg.OpExecutionContext) -> None:
    """Log each finding and its reason; end the machines unless it is a dry run.

    Fails if the sweep could not list or end some machines.
    """
    report = sky.sweep(providers=PROVIDERS, is_dry_run=context.op_config["is_dry_run"])
    for finding in report.findings:
        context.log.info("%s", as_line(finding))
    for line in report.pruned:
        context.log.info("removed, because it is not used any more: %s", line)
    metadata = {"findings": len(report.findings), "ended": [as_line(finding) for finding in report.ended]}
    if report.failures:
        raise dg.Failure(
            "some machines could not be listed or ended; the next sweep tries again: "
            + "; ".join(map(str, report.failures)),
            metadata=metadata,
        )
    context.add_output_metadata(metadata)


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
    # The steps of one process share the pool. With Dagster's default executor each step opens a pool.
    executor=dg.in_process_executor,
)


def main() -> None:
    """Materialize both assets, and print the results as one line.

    The Dagster instance is that of DAGSTER_HOME, else a temporary one.
    """
    started = time.monotonic()
    with dg.DagsterInstance.get() if os.environ.get("DAGSTER_HOME") else dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([digits_candidates, digits_model], resources=defs.resources, instance=instance)
    materializations = [
        {name: entry.value for name, entry in event.materialization.metadata.items()}
        for event in result.get_asset_materialization_events()
    ]
    report = {
        "accuracy": round(result.output_for_node("digits_model"), 4),
        "calls": sum(metadata["calls"] for metadata in materializations),
        "seconds": round(time.monotonic() - started, 1),
        "cost_usd": round(sum(metadata["skyward/cost_usd"] for metadata in materializations), 6),
    }
    print(f"digits_sweep: {json.dumps(report)}")


if __name__ == "__main__":
    main()
