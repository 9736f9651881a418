"""A lock for any code, over any redis-py client. It does not depend on Celery."""
