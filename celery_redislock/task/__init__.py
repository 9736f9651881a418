"""A task and its lock, from the publish to the end of the run: decisions, and Celery's hooks that carry them out."""
