"""A lock for any code, over any redis-py client. It does not know Celery."""
