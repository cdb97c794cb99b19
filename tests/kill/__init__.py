"""Kill -9 at every boundary: a fake rental service over HTTP, its provider, generated kill points, and a check of what
is alive after each.
"""
