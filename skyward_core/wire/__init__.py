"""What clients and nodes share: messages, operations, settings of nodes, masking. Needs no Dask, but for `streams`."""
