"""The web page, served in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_redislock.web.pages import Options
from celery_redislock.web.server import listen, server_for
from tests.lab.servers import wait_until


@contextmanager
def page(app: Celery, **options: Any) -> Iterator[str]:
    """The page of `app`, at the URL that is yielded, until the block ends."""
    server = server_for(app, Options(**options))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), name="lab-web", daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive(), "the page is served")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
