"""Values and exceptions to bytes and back, on the client and on nodes. Needs the standard library and cloudpickle."""
