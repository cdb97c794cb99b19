"""From a spec to a lease and back: the only code that starts or stops spending."""
