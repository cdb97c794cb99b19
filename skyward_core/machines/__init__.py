"""Machines as values: instances, nodes, leases and their signatures, offers, spot strategies, owners."""
