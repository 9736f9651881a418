"""Waiting for a turn at a key: a process's waiters, and the room that stands in line for them."""
