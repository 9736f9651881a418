"""A task and its lock, from the publish to the end of the run."""
