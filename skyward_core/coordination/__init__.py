"""Locks, events, queues, semaphores and variables that all calls of a pool share (docs/decisions/0027)."""
