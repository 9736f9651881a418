"""The web page: who holds what, who waits, and what happened. Only ``celery locks web`` imports it (extra ``web``)."""
