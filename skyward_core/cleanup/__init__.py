"""Ends machines that are left: the sweep with its policy, and the reaper, which ends a pool when its owner is gone."""
