"""A pool as joblib's backend, for scikit-learn too; `tasks.py` runs on nodes."""
