"""scikit-learn's `GridSearchCV` over a pool: each fold of each candidate is a call.

Run it with `python examples/grid_search.py`. It searches the parameters of a support vector machine for handwritten
digits, and tests the best one on other digits.

Install what it needs with `pip install ".[examples]"` in a clone of the repository.
"""

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.svm import SVC

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...

GRID = {"gamma": [1e-4, 1e-3, 1e-2], "C": [1, 10]}


def main() -> None:
    """Rent the nodes, search, and end the nodes. The nodes get your version of scikit-learn."""
    images, digits = load_digits(return_X_y=True)
    seen, unseen, seen_digits, unseen_digits = train_test_split(images, digits, test_size=0.25, random_state=0)
    search = GridSearchCV(SVC(), GRID, cv=3, n_jobs=-1)
    with sky.ScikitLearnPool(provider=PROVIDER, nodes=2):
        search.fit(seen, seen_digits)
    print("best parameters:", search.best_params_)
    print(f"right on unseen digits: {search.score(unseen, unseen_digits):.1%}")


if __name__ == "__main__":
    main()
