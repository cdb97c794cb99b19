"""Ending what is left: the sweep with its policy, and the reaper, a process that ends a pool when its owner is gone."""
