"""A delivered message: what is known of it, what its header carries, and how it waits or is sent back."""
