"""A small Celery app that shows three uses of celery-redislock."""
