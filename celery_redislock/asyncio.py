"""Locks for coroutines. `Lock` works over any client of `redis.asyncio`; `locked` uses the app's lock server."""

from .lock.async_lock import Lock
from .locked import locked

__all__ = ["Lock", "locked"]
