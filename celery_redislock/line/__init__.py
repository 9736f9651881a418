"""Waiting for a turn at a key: the waiters of this process, and the room in which they stand in line."""
