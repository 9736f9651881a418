"""The lock server: what a key holds, the scripts that change it, and the connections to it. It does not know Celery."""
