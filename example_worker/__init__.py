"""A small Celery app that shows the three uses of celery-redislock."""
