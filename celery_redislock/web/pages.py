"""Pages: what is shown at which address.

Every value in a page goes through `shown`, which escapes control and bidirectional characters, and then through
Jinja's own escaping, so no name, key or id is ever markup.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from celery import Celery
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from celery_redislock.cli.console import Nothing, unreachable
from celery_redislock.cli.locks import Locks, silent
from celery_redislock.cli.rows import ORDERS, oldest_first, with_one_spent
from celery_redislock.cli.sentences import age, counted, duration
from celery_redislock.cli.why import Why
from celery_redislock.cli.workers import Workers
from celery_redislock.errors import LONGEST, shown
from celery_redislock.protocol.names import LockPart

from .actions import Actions, Question
from .guard import Guard, asked_of, form_of
from .snapshot import Asked, Line, Snapshot, Snapshots, Waiter
from .timeline import Timeline

Found = TypeVar("Found", Line, Waiter)

#: Rows on one page.
PAGE = 50
#: Keys in the time line.
LANES = 40
#: How far back the time line looks, in minutes.
MINUTES = ("1", "5", "15", "60")
#: The choices above the table of keys, each with the states that it shows.
SHOWS = {
    "all": set[str](),
    "held": {"held", "stopping"},
    "waited for": set[str](),
    "queued": {"queued", "sending"},
    "kept": {"cooling", "spent", "offered"},
}
#: What a URL may ask for, besides a key or an id.
ASKED = ("q", "show", "sort", "next", "wrong")
READ_ONLY = Question(["Refused: this page is read-only."], can_act=False)
STRANGE = Question(["Refused: the form is not from this page. Open it again. Nothing was done."], can_act=False)
HERE = Path(__file__).parent


class Options(NamedTuple):
    """How the page is served."""

    host: str = "127.0.0.1"
    token: str | None = None
    read_only: bool = False
    timeout: float = 1.0
    """Seconds to wait for the workers' answers."""


def web_app(app: Celery, options: Options) -> Starlette:
    """The page of a Celery app, as an ASGI app.

    Args:
        app: The app, with its tasks loaded.
        options: How it is served.

    Raises:
        LockConfigError: The app has no lock server.
    """
    pages = Pages(app, options)
    return Starlette(
        routes=[*pages.routes()],
        middleware=[Middleware(Guard, host=options.host, token=options.token)],
        lifespan=pages.lifespan,
    )


class Pages:
    """The pages, and what they are made from."""

    def __init__(self, app: Celery, options: Options) -> None:
        self._app, self._options, self._ask = app, options, Asked()
        self._snapshots, self._timeline = Snapshots(app, options.timeout), Timeline(app)
        self._actions, self._csrf = Actions(app, options.timeout), secrets.token_urlsafe(32)
        self._templates = Environment(
            loader=PackageLoader(str(__package__)),
            autoescape=True,
            finalize=_printable,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals.update(link=link, counted=counted, duration=duration, age=age, when=_when)
        self._templates.globals.update(where=Locks(app).where, read_only=options.read_only, csrf=self._csrf)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Run the threads until the server ends."""
        self._snapshots.start()
        self._timeline.start()
        yield
        self._snapshots.stop()
        self._timeline.stop()

    def routes(self) -> Iterator[Route | Mount]:
        """What is shown where."""
        for page in (self.keys, self.waiting, self.key, self.task, self.timeline, self.login, self.live):
            yield Route("/" if page == self.keys else f"/{page.__name__}", page, methods=["GET"])
        for action in ("release", "drop", "revoke"):
            yield Route(f"/{action}", self.ask, methods=["GET"])
            yield Route(f"/{action}", self.act, methods=["POST"])
        yield Mount("/static", StaticFiles(directory=HERE / "static"))

    def _render(
        self, page: str, request: Request, snapshot: Snapshot | None = None, status: int = 200, **about: Any
    ) -> Response:
        """A page; with a snapshot, the script keeps it up to date."""
        about |= {"page": page, "snapshot": snapshot, "now": datetime.now(UTC)}
        asked = dict.fromkeys(ASKED, "") | asked_of(request.scope)
        return HTMLResponse(self._templates.get_template(f"{page}.html").render(asked=asked, **about), status)

    # Rendered from the snapshot.

    def keys(self, request: Request) -> Response:
        """Who holds what."""
        asked, snapshot = asked_of(request.scope), self._snapshots.fresh()
        order = asked.get("sort", "") if asked.get("sort") in ORDERS else "age"
        show = asked.get("show", "") if asked.get("show") in SHOWS else "all"
        lines: Sequence[Line] = snapshot.sorted_by(order)
        if SHOWS[show]:
            lines = [line for line in lines if line.row.state in SHOWS[show]]
        elif show == "waited for":
            lines = [line for line in lines if line.row.waiting]
        about: dict[str, Any] = {"orders": ORDERS, "order": order, "shows": SHOWS, "show": show, **_found(lines, asked)}
        return self._render("keys", request, snapshot, **about)

    def waiting(self, request: Request) -> Response:
        """Who waits, where, in which order, and for how long."""
        asked, snapshot = asked_of(request.scope), self._snapshots.fresh()
        return self._render("waiting", request, snapshot, **_found(snapshot.waiting, asked))

    def key(self, request: Request) -> Response:
        """One lock: its holders, its line and what happened to it."""
        name, snapshot, known = asked_of(request.scope).get("key", ""), self._snapshots.fresh(), Locks(self._app)
        lock = part.lock if (part := LockPart.of(name)) else name
        rows = snapshot.locks.get(lock, ())
        if not rows and not snapshot.problem:  # a `Lock` whose name has no prefix is in no snapshot
            try:
                rows = self._ask(("key", lock), lambda: known.of(lock))
            except RedisError as error:
                snapshot = replace(snapshot, problem=unreachable(self._app, error))
        rows, now = sorted(with_one_spent(rows), key=oldest_first), datetime.now(UTC)
        about: dict[str, Any] = {
            "lock": lock,
            "held": [(row, known.held(row, now)) for row in rows if row.state != "free"],
            "line": [one for one in snapshot.waiting if one.key == lock],
            "waiting": rows[0].waiting if rows else 0,
            "silent": silent(rows, snapshot.counts.conflicts) if not snapshot.counts.unasked else [],
            "bars": self._lanes(snapshot, 5, lock).get(lock, []),
        }
        return self._render("key", request, snapshot, **about)

    def timeline(self, request: Request) -> Response:
        """What happened since the page was started."""
        asked, snapshot = asked_of(request.scope), self._snapshots.fresh()
        word, minutes = _word(asked), asked.get("minutes", "")
        if minutes not in MINUTES:
            minutes = "1" if time.time() - self._timeline.since < 60 else "5"
        lanes = self._lanes(snapshot, int(minutes))
        lanes = {
            key: bars
            for key, bars in lanes.items()
            if word in key.lower() or any(word in bar["task_id"].lower() for bar in bars)
        }
        about: dict[str, Any] = {
            "lanes": [*lanes.items()][:LANES],
            "left_out": max(0, len(lanes) - LANES),
            "events": [one for one in reversed(self._timeline.heard) if word in one.text][:PAGE],
            "minutes": minutes,
            "choices": MINUTES,
            "timeline": self._timeline,
        }
        return self._render("timeline", request, snapshot, **about)

    def _lanes(self, snapshot: Snapshot, minutes: int, key: str | None = None) -> dict[str, list[dict[str, Any]]]:
        """The bars of each key, from the left to the right in percent."""
        now, seconds = time.time(), minutes * 60.0

        def drawn(what: str, begin: float, end: float, task_id: str) -> dict[str, Any]:
            left = max(0.0, 100 - (now - begin) / seconds * 100)
            lasted = f" for {duration(end - begin)}" if end > begin else ""
            title = f"{what}{lasted}, {_when(begin)}, task {shown(task_id)}"
            width = max(0.0, 100 - (now - end) / seconds * 100 - left)
            return {"what": what, "x": left, "width": width, "title": title, "task_id": task_id}

        lanes = self._timeline.lanes(now, seconds, snapshot.living, key)
        return {one: [drawn(*bar) for bar in bars] for one, bars in lanes.items()}

    # Asked for.

    def task(self, request: Request) -> Response:
        """Why a task has not run."""
        task_id = asked_of(request.scope).get("id", "").strip()
        said = self._ask(("task", task_id), lambda: [*self._why(task_id)]) if task_id else []
        keys = dict.fromkeys(key for _, key in said if key)
        events = [one for one in reversed(self._timeline.heard) if one.task_id == task_id][:PAGE]
        latest = self._snapshots.latest()
        return self._render("task", request, latest, task_id=task_id, said=said, keys=keys, events=events)

    def _why(self, task_id: str) -> Iterator[tuple[str, str | None]]:
        """What `why` says, line by line, each with the key that it is about."""
        try:
            for one in Why(Locks(self._app), Workers(self._app, self._options.timeout), task_id).said():
                key = one.about["key"] if one.about else None
                yield from ((text, key) for text in one.text.splitlines())
        except RedisError as error:  # the sentences before it are true
            yield unreachable(self._app, error), None
        except Nothing:  # the last sentence has said that
            return

    async def live(self, request: Request) -> Response:
        """Server-sent events: the number of each snapshot. The script then loads its page again."""

        async def numbers() -> AsyncIterator[str]:
            number = -1
            while not await request.is_disconnected():
                if (latest := self._snapshots.latest().number) != number:
                    number = latest
                    yield f"data: {number}\n\n"
                await asyncio.sleep(0.25)

        return StreamingResponse(numbers(), media_type="text/event-stream")

    def login(self, request: Request) -> Response:
        """Where the token is typed in."""
        return self._render("login", request)

    # Done.

    def ask(self, request: Request) -> Response:
        """Ask before an action."""
        if self._options.read_only:
            return self._answer(request, READ_ONLY, 403)
        return self._answer(request, self._actions.question(*_action(request)))

    async def act(self, request: Request) -> Response:
        """Do it, if the form is one of this page."""
        form = await form_of(request)
        if self._options.read_only:
            return self._answer(request, READ_ONLY, 403)
        if not hmac.compare_digest(form.get("csrf", "").encode(), self._csrf.encode()):
            return self._answer(request, STRANGE, 403)
        client = request.client.host if request.client else "an unknown client"
        result = await run_in_threadpool(self._actions.act, *_action(request), form, client)
        return self._answer(request, Question([result], can_act=False))

    def _answer(self, request: Request, question: Question, status: int = 200) -> Response:
        action, about = _action(request)
        return self._render("confirm", request, status=status, action=action, about=about, question=question)


def link(path: str, **query: object) -> Markup:
    """The URL of a page, for a template. Parameters that are empty are left out."""
    given = {name: _bytes(str(value)) for name, value in query.items() if value not in {None, ""}}
    return escape(f"{path}?{urlencode(given)}" if given else path)


def _bytes(text: str) -> bytes:
    """`text` as it was stored; with question marks, if it cannot have been."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, as a JSON string may have it
        return text.encode("utf-8", "replace")


def _printable(value: Any) -> Any:
    """What a template writes: text, with its unprintable characters escaped, before Jinja escapes it for HTML."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown(value, LONGEST)


def _when(seconds: float) -> str:
    """A time of day, of seconds since the epoch."""
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}"


def _action(request: Request) -> tuple[str, str]:
    """The name of an action, and the key or the task id that it is about."""
    action, asked = request.scope["path"].strip("/"), asked_of(request.scope)
    return action, asked.get("id" if action == "revoke" else "key", "")


def _word(asked: Any) -> str:
    """What is searched for."""
    return str(asked.get("q", "")).strip().lower()


def _found(lines: Sequence[Found], asked: Any) -> dict[str, Any]:
    """The part of the lines that one page shows, and how many there are."""
    word = _word(asked)
    found = [line for line in lines if word in line.text] if word else lines
    pages = max(1, -(-len(found) // PAGE))
    number = asked.get("page", "1")
    page = min(max(1, int(number)), pages) if number.isascii() and number.isdecimal() and len(number) < 10 else 1
    return {"lines": found[(page - 1) * PAGE : page * PAGE], "number": len(found), "at": page, "pages": pages}
