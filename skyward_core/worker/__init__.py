"""What runs on a node. Needs the standard library, cloudpickle, psutil and Dask; no cloud SDK, no SSH, no pydantic."""
