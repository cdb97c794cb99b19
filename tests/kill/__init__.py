"""Kill -9 at every boundary: a fake rental service, its provider, kill points, and a check of what is alive after."""
