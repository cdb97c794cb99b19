"""From a wish to a lease and back: the only code that starts or stops spending."""
