"""The execution engine: calls of one pool on the Dask cluster of its nodes.

Importing the package imports no Dask; `engine.cluster` does.
"""
