"""A hyper-parameter sweep over scikit-learn's digits, as a Prefect flow on an ephemeral pool.

`python flows/digits_sweep.py` runs it: against the server that PREFECT_API_URL names, else with its own API. Twelve
candidates of a support vector machine are cross-validated in five folds; each fold is one call on the pool's two nodes.
The best is trained, and tested on images that were not used before.
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
    """Load the images and keep a quarter of them for the test: (training images, test images, training labels, test
    labels).
    """
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
    """Train on all folds but one; return the accuracy on that one."""
    from sklearn.model_selection import StratifiedKFold

    images, _, labels, _ = split()
    train, held_out = list(StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(images, labels))[fold]
    accuracy = classifier(candidate).fit(images[train], labels[train]).score(images[held_out], labels[held_out])
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
    """Cross-validate every candidate, train the best, report its accuracy and the cost."""
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
