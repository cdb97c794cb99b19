"""Machines as values: instances, nodes, leases and their signatures, offers and their ranking, spot strategies,
owners.
"""
