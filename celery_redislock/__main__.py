"""``python -m celery_redislock -A proj``: as ``celery -A proj locks``."""

from .cli.program import main

main()
