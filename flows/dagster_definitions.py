"""A small Dagster project whose work runs on ephemeral pools: find the best support vector machine for handwritten
digits.

    python flows/dagster_definitions.py             materializes all assets once, and prints a report
    dagster dev -f flows/dagster_definitions.py     starts the UI: Catalog > digits_model > Metadata shows and plots
    skyward/cost_usd

| definition           | shows                                                                              |
| -------------------- | ---------------------------------------------------------------------------------- |
| `digits_candidates`  | a cross-validated sweep, 60 calls on two nodes                                     |
| `digits_model`       | a step with its own hardware, by the tag `skyward/config`                          |
| `digits_by_half`     | a partitioned asset; a backfill is one run, and so one pool                        |
| `digits_model_cost`  | a check of the cost of the latest materialization                                  |
| `digits` at 2:00     | a job and its schedule                                                             |
| `upkeep()`           | the sweep of dead pools every ten minutes, and sensors that release shared pools   |

Turn schedules and sensors on under Automation. The nodes install scikit-learn and load its 1,797 digits; this computer
does not need scikit-learn.

Install what it needs with `pip install ".[dagster,sklearn]"` in a clone of the repository.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import product
from statistics import mean

import dagster as dg

import skyward_core as sky
from dagster_skyward import SkywardResource, build_cost_check, upkeep

FOLDS = 5


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


def examine(candidate: Candidate, numbers: tuple[int, ...] = tuple(range(10))) -> float:
    """Train on all training images; return the accuracy on the test images of these numbers."""
    from sklearn.svm import SVC

    train_images, test_images, train_labels, test_labels = digits()
    model = SVC(**asdict(candidate)).fit(train_images, train_labels)
    asked = [label in numbers for label in test_labels]
    return float(model.score(test_images[asked], test_labels[asked]))


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


@dg.asset(kinds={"scikitlearn"}, op_tags={"skyward/config": {"nodes": 1}})
def digits_model(
    context: dg.AssetExecutionContext, compute: SkywardResource, digits_candidates: dict[Candidate, float]
) -> dg.MaterializeResult[float]:
    """The best candidate's accuracy on the test images. One node is enough for it."""
    best = best_of(digits_candidates)
    accuracy = compute.run(context, examine, best).value
    return dg.MaterializeResult(
        value=accuracy, metadata={"accuracy": accuracy, "calls": 1, "C": best.C, "gamma": best.gamma}
    )


HALVES = {"low": (0, 1, 2, 3, 4), "high": (5, 6, 7, 8, 9)}


@dg.asset(
    kinds={"scikitlearn"},
    partitions_def=dg.StaticPartitionsDefinition(list(HALVES)),
    backfill_policy=dg.BackfillPolicy.single_run(),
)
def digits_by_half(
    context: dg.AssetExecutionContext, compute: SkywardResource, digits_candidates: dict[Candidate, float]
) -> dg.MaterializeResult:
    """The best candidate's accuracy on the numbers of each partition."""
    best, halves = best_of(digits_candidates), context.partition_keys
    accuracies = compute.map(context, examine, [best] * len(halves), map(HALVES.get, halves))
    return dg.MaterializeResult(
        metadata={f"accuracy_{half}": one for half, one in zip(halves, accuracies, strict=True)}
    )


def best_of(candidates: dict[Candidate, float]) -> Candidate:
    """Return the candidate with the highest accuracy."""
    return max(candidates, key=lambda candidate: candidates[candidate])


digits_model_cost = build_cost_check(digits_model, max_usd=1.0)
digits_job = dg.define_asset_job("digits", [digits_candidates, digits_model])

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[digits_candidates, digits_model, digits_by_half],
        asset_checks=[digits_model_cost],
        jobs=[digits_job],
        schedules=[dg.ScheduleDefinition(job=digits_job, cron_schedule="0 2 * * *")],
        resources={
            # all steps of a run share its pools, also if each has a process of its own, as Dagster's default is
            "compute": SkywardResource(
                provider=sky.Local(price_per_hour=1.2),
                nodes=2,
                image=sky.Image(pip=["scikit-learn"]),
                max_cost=1.0,
                sharing="run",
            )
        },
    ),
    upkeep(cron_schedule="*/10 * * * *"),
)


def main() -> None:
    """Materialize all assets, and print the results as one line.

    The Dagster instance is that of DAGSTER_HOME, else a temporary one.
    """
    started = time.monotonic()
    with dg.DagsterInstance.get() if os.environ.get("DAGSTER_HOME") else dg.DagsterInstance.ephemeral() as instance:
        options = {"resources": defs.resources, "instance": instance}
        first = dg.materialize([digits_candidates, digits_model, digits_model_cost], **options)
        both = {"dagster/asset_partition_range_start": "low", "dagster/asset_partition_range_end": "high"}
        second = dg.materialize([digits_candidates, digits_by_half], selection=[digits_by_half], tags=both, **options)
    materializations = [
        {name: entry.value for name, entry in event.materialization.metadata.items()}
        for result in (first, second)
        for event in result.get_asset_materialization_events()
    ]
    (check,) = first.get_asset_check_evaluations()
    report = {
        "accuracy": round(first.output_for_node("digits_model"), 4),
        "by_half": {half: round(materializations[-1][f"accuracy_{half}"], 4) for half in HALVES},
        "calls": sum(metadata.get("calls", 1) for metadata in materializations),
        "seconds": round(time.monotonic() - started, 1),
        "cost_usd": round(sum(metadata["skyward/cost_usd"] for metadata in materializations), 6),
        "is_cheap": check.passed,
    }
    print(f"digits_sweep: {json.dumps(report)}")


if __name__ == "__main__":
    main()
