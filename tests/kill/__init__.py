"""Kill -9 at every boundary: a fake rental service over HTTP, a provider that talks to it, generated points of death,
and what was found alive after each.
"""
