"""A task and its lock, from the publish to the end of the run: the decisions, and the Celery hooks that act on them."""
