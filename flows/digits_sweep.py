"""Sweep hyper-parameters over scikit-learn's digits, as a Prefect flow on an ephemeral pool.

`python flows/digits_sweep.py` runs it on the server of PREFECT_API_URL, else on a temporary one. The flow
cross-validates twelve candidates of a support vector machine in five folds. Each fold is one call on a pool of two
nodes. The flow then trains the best candidate, and tests it on other images.

Install what it needs with `pip install ".[prefect,sklearn]"` in a clone of the repository.
"""

import json
import time
from dataclasses import asdict, dataclass
from itertools import product

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, cost_so_far

FOLDS = 5
SEED = 0


@dataclass(frozen=True)
class Candidate:
    """Hyper-parameters of a support vector machine with a radial kernel."""

    gamma: float
    penalty: float


GRID = [Candidate(gamma, penalty) for gamma, penalty in product([1e-4, 3e-4, 1e-3, 3e-3], [0.1, 1.0, 10.0])]


def split():
    """Return training images, test images, training labels, test labels. A quarter of the images is for the test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    return train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=SEED)


def classifier(candidate: Candidate):
    """Return an untrained classifier."""
    from sklearn.svm import SVC

    return SVC(gamma=candidate.gamma, C=candidate.penalty)


@task(task_run_name="fold {fold} of gamma={candidate.gamma}, C={candidate.penalty}", retries=1, cache_policy=NO_CACHE)
def validate(candidate: Candidate, fold: int) -> float:
    """Train on all folds but one; return the accuracy on that fold."""
    from sklearn.model_selection import StratifiedKFold

    images, _, labels, _ = split()
    train, held_out = list(StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(images, labels))[fold]
    try:
        model = classifier(candidate).fit(images[train], labels[train])
    except ValueError as error:  # scikit-learn refuses the candidate: another try would meet the same
        raise sky.GiveUp(f"{candidate}: {error}") from error
    accuracy = model.score(images[held_out], labels[held_out])
    print(f"{candidate}: {accuracy:.4f} on fold {fold}")
    return accuracy


@task(retries=1, cache_policy=NO_CACHE)
def judge(candidate: Candidate) -> float:
    """Train on all training images; return the accuracy on the test images."""
    training_images, test_images, training_labels, test_labels = split()
    accuracy = classifier(candidate).fit(training_images, training_labels).score(test_images, test_labels)
    print(f"{candidate}: {accuracy:.4f} on {len(test_labels)} unseen images")
    return accuracy


@flow(
    log_prints=True,
    task_runner=SkywardTaskRunner(
        provider=sky.Local(price_per_hour=1.2), nodes=2, concurrency=1, image=sky.Image(pip=["scikit-learn"])
    ),
)
def digits_sweep() -> dict[str, float]:
    """Cross-validate each candidate, train the best one, and report its accuracy and the cost."""
    started = time.perf_counter()
    trials = [(candidate, fold) for candidate in GRID for fold in range(FOLDS)]
    accuracies = validate.map(*zip(*trials, strict=True)).result()
    mean = {candidate: sum(accuracies[i * FOLDS : (i + 1) * FOLDS]) / FOLDS for i, candidate in enumerate(GRID)}
    best = max(GRID, key=mean.__getitem__)
    print(f"best of {len(GRID)}: {asdict(best)} with a mean accuracy of {mean[best]:.4f}")
    report = {
        "accuracy": round(judge.submit(best).result(), 4),
        "calls": len(trials) + 1,
        "seconds": round(time.perf_counter() - started, 1),
        "cost_usd": round(cost_so_far(), 4),
    }
    print("digits_sweep:", json.dumps(report))
    return report


if __name__ == "__main__":
    digits_sweep()
