"""Single refusals: each call site of the system that a run reaches says no once."""
