"""Tasks that show how a pool of many slots holds its locks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from celery import Celery

from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("held_until", bind=True, lock_args=["key"], lock_lease=6.0)
    def held_until(self: Any, key: Any, file: str) -> tuple[str, str, str]:
        """Holds its key until the file is there, and tells which key it saw at its begin and at its end, and the state.

        It looks seldom, for a thousand of them may look.
        """
        before = self.lock.key
        end = time.monotonic() + 60
        while not Path(file).exists() and time.monotonic() < end:
            time.sleep(0.2)
        return before, self.lock.key, self.lock.state

    @locked("shows_itself", bind=True, lock_args=["key"])
    def shows_itself(self: Any, key: Any) -> dict[str, int]:
        """Which objects its task and the task's class have as attributes, by their identities, while it runs."""
        owners = (self, *type(self).__mro__)
        return {
            f"{number}.{name}": id(value) for number, owner in enumerate(owners) for name, value in vars(owner).items()
        }
