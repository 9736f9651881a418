"""Actions: release a key, drop its line, revoke a task. Each is asked first, and logged."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click
from celery import Celery
from redis.exceptions import RedisError

from celery_redislock.cli.console import unreachable
from celery_redislock.cli.locks import Locks
from celery_redislock.cli.release import HARM, WaitingLine, answers_of
from celery_redislock.cli.rows import Row
from celery_redislock.cli.sentences import counted
from celery_redislock.cli.workers import Workers, patiently
from celery_redislock.errors import LONGEST, describe, fields, shown

logger = logging.getLogger(__name__)


class Question(NamedTuple):
    """What is asked before something is done."""

    said: list[str]
    can_act: bool = True
    holder: str = ""
    """Of a release: a digest of the token that was seen. Only this token is released."""


class Actions:
    """What the page can do.

    Args:
        app: The app, with its tasks loaded.
        timeout: Seconds to wait for the workers' answers.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app, self._timeout = app, timeout

    def question(self, action: str, about: str) -> Question:
        """What to ask before ``release`` or ``drop`` of a key, or ``revoke`` of a task id."""
        asked = self._try(f"_before_{action}", about)
        return asked if isinstance(asked, Question) else Question([asked], can_act=False)

    def act(self, action: str, about: str, form: Mapping[str, str], client: str) -> str:
        """Do it.

        Args:
            action: ``release``, ``drop`` or ``revoke``.
            about: The key or the task id.
            form: What the form says besides.
            client: The address of the user, for the log.

        Returns:
            The result, as a sentence.
        """
        result: str = self._try(f"_{action}", about, form)
        named = {"task_id" if action == "revoke" else "key": about}
        extra = fields("by_hand", **named, reason=f"{action}: {result}")
        logger.warning("%s on the web page, %s %s: %s", client, action, shown(about, LONGEST), result, extra=extra)
        return result

    def _try(self, method: str, *about: Any) -> Any:
        """What a method returns; if it fails, why, as a sentence."""
        try:
            return getattr(self, method)(*about)
        except RedisError as error:
            return f"Nothing was done: {unreachable(self._app, error)}"
        except click.ClickException as error:
            return error.message
        except UnicodeEncodeError:  # the lock server's scripts take only keys that are text
            return "Nothing was done: this name is not UTF-8."

    @property
    def _tools(self) -> tuple[Locks, Workers]:
        return Locks(self._app), Workers(self._app, self._timeout)

    def _before_release(self, key: str) -> Question:
        known, workers = self._tools
        row = _held_at(known, key)
        if row is None:
            return Question([f"{shown(key, LONGEST)} is free."], can_act=False)
        if not known.ours(row):
            return Question(["It is no key of this app: `celery locks release --foreign` releases it."], can_act=False)
        return Question(
            [known.held(row, datetime.now(UTC)), *answers_of(row, workers), HARM[row.state]], holder=_digest(row)
        )

    def _release(self, key: str, form: Mapping[str, str]) -> str:
        known, _ = self._tools
        row = _held_at(known, key)
        if row is None or not known.ours(row) or _digest(row) != form.get("holder") or not known.release(row):
            return "Nothing was released: its holder has changed."
        return "Released."

    def _before_drop(self, key: str) -> Question:
        return Question([WaitingLine(*self._tools, key).would_end, "The run that holds the key goes on."])

    def _drop(self, key: str, form: Mapping[str, str]) -> str:
        line = WaitingLine(*self._tools, key)
        dropped = f"Dropped {counted(line.drop(), 'message')}."
        again = f" These workers did not answer; drop again: {', '.join(line.silent)}." if line.silent else ""
        return dropped + again

    def _before_revoke(self, task_id: str) -> Question:
        waits = (
            "A worker that gets its message drops it as REVOKED: at once if it waits for a lock, otherwise when it"
            " would start. Workers forget this when they restart."
        )
        runs = "A run that has started goes on, unless you terminate it: SIGTERM ends its process. It is not run again."
        return Question([waits, runs])

    def _revoke(self, task_id: str, form: Mapping[str, str]) -> str:
        ends, wait = "terminate" in form, self._timeout
        revoke = self._app.control.revoke
        try:
            found = patiently(lambda: revoke(task_id, terminate=ends, reply=True, timeout=wait), waits=wait)
        except Exception as error:  # noqa: BLE001 - errors from the broker's library
            return f"The workers could not be asked: {describe(error)}."
        done = "Terminated" if ends else "Revoked"
        return f"{done}: {counted(len(found), 'worker')} answered." if found else "No worker answered."


def _held_at(known: Locks, key: str) -> Row | None:
    """The holder of exactly this key; None if it is free."""
    return next((row for row in known.of(key) if row.part.key == key and row.state != "free"), None)


def _digest(row: Row) -> str:
    return hashlib.sha256(row.token.value).hexdigest()
