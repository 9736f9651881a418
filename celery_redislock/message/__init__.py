"""A delivered message: what a worker knows about it, what its header carries, and how it waits or is sent back."""
