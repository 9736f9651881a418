"""A small Celery app that shows six uses of celery-redislock."""
