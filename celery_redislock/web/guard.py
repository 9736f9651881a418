"""Guard: who may see the page, and what a browser may do with it.

On loopback the name in the ``Host`` header is checked, because another site's name may lead to this host (DNS
rebinding). Anywhere else, a token is needed.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Sent with every answer. A form's Origin would be "null" without a referrer.
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
    "referrer-policy": "same-origin",
}
#: The shortest token. It must be too long to guess: the delay slows down only one guess after the other.
SHORTEST = 16
#: The longest form, in bytes.
LONGEST_FORM = 10_000
#: Seconds that a wrong token takes.
DELAY = 1.0
OPEN = ("/login", "/static/")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """A middleware that refuses requests before any page sees them.

    Args:
        app: What is guarded.
        host: Where the server listens.
        token: What a user must know; None on loopback, for no login.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        self._app, self._token = app, token
        self._is_local = is_loopback(host)
        self._session = secrets.token_urlsafe(32)
        self._asking = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        request = Request(scope, receive)
        answer = self._refuse(request)
        if answer is None and self._token is not None and (scope["path"], scope["method"]) == ("/login", "POST"):
            answer = await self._login(request, self._token)
        await (answer or self._app)(scope, receive, guarded)

    def _refuse(self, request: Request) -> Response | None:
        host, path = request.headers.get("host", "").lower(), request.scope["path"]  # `request.url` believes the host
        if self._is_local and not (is_loopback(host) or is_loopback(host.rpartition(":")[0])):
            return PlainTextResponse("This page answers only to 127.0.0.1, ::1 and localhost.", 421)
        if request.method == "POST":
            length = request.headers.get("content-length", "")
            if not length.isdecimal() or int(length) > LONGEST_FORM:
                return PlainTextResponse("The form is too long.", 413)
            if request.headers.get("origin", "").partition("://")[2].lower() != host:
                return PlainTextResponse("The form was sent from another site (Origin). Nothing was done.", 403)
        if self._token is None or path.startswith(OPEN) or self._is_known(request):
            return None
        if request.method != "GET" or path == "/live":
            return PlainTextResponse("Log in first.", 401)
        raw = path, request.scope["query_string"].decode("ascii", "replace")
        return RedirectResponse(f"/login?{urlencode({'next': '?'.join(filter(None, raw))})}", 303)

    @staticmethod
    def _cookie(request: HTTPConnection) -> str:
        """The name of the cookie. Cookies do not tell the ports of a host apart, so it has the port."""
        return f"redislock_{(request.scope.get('server') or ('', 0))[1]}"

    def _is_known(self, request: HTTPConnection) -> bool:
        return _equal(request.cookies.get(self._cookie(request), ""), self._session)

    async def _login(self, request: Request, token: str) -> Response:
        given, asked = (await form_of(request)).get("token", ""), asked_of(request.scope)
        if not _equal(given, token):
            async with self._asking:  # one guess at a time
                await asyncio.sleep(DELAY)
            return RedirectResponse(f"/login?wrong=1&{urlencode(asked, errors='surrogateescape')}", 303)
        answer = RedirectResponse(_path(asked.get("next", "/")), 303)
        is_https = request.scope["scheme"] == "https"
        answer.set_cookie(self._cookie(request), self._session, httponly=True, samesite="strict", secure=is_https)
        return answer


def _path(wanted: str) -> str:
    """`wanted` if it is a path of this site."""
    is_ours = wanted.isprintable() and wanted.startswith("/") and not wanted.startswith(("//", "/\\"))
    return wanted if is_ours else "/"


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), known.encode())


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form."""
    return dict(parse_qsl((await request.body()).decode("utf-8", "replace"), keep_blank_values=True))


def asked_of(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """The parameters of a URL. A key may have bytes that are not text: they survive as `surrogateescape` has them."""
    query: bytes = scope["query_string"]
    return dict(parse_qsl(query.decode("ascii", "replace"), errors="surrogateescape"))
