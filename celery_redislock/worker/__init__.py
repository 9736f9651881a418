"""The worker's main process: what it starts, what its children hold, and what becomes of that when they die."""
