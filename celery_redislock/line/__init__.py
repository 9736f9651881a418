"""Waiting for a turn at a key: those who wait in this process, and the room in which they stand in line."""
