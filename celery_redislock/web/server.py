"""Server: uvicorn, with what it may say and hear."""

from __future__ import annotations

import socket

import uvicorn
from celery import Celery

from .pages import Options, web_app


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; with port 0 at any port.

    Raises:
        OSError: The address cannot be used.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def server_for(app: Celery, options: Options) -> uvicorn.Server:
    """A server for the page, not yet started.

    It has no access log, which would have keys and ids, and believes no header about the client's address, because the
    log says who did what.

    Args:
        app: The app, with its tasks loaded.
        options: How it is served.
    """
    return uvicorn.Server(
        uvicorn.Config(
            web_app(app, options),
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
    )
