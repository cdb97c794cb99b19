"""Preparation of a machine before it is a node: packages, environment variables, volumes."""
