"""Decides who may see the pages, and who may change something.

Every user of this machine can connect to a loopback port, and any page that a browser shows can
send it requests. So there is a token always; a name that another DNS may hold is no name of ours;
and what changes something must come from a page of ours.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from orchestrator.common.hosts import is_this_machine

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer" a form of our own pages would come from the origin "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "Open the address that `orchestrator dashboard` printed: it has a token.\n"


@dataclass(frozen=True)
class Guard:
    """The secrets of one server, and the names by which it may be called."""

    port: int
    names: frozenset[str] = frozenset()  # beside localhost, this machine's own, and addresses
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @property
    def cookie(self) -> str:
        """Name the cookie: a browser gives cookies of one host to all its ports.

        Two dashboards of two machines, both on the usual port there, have one host behind ssh -L.
        """
        return f"orchestrator-{self.port}-{self.derived('cookie')[:8]}"

    @property
    def form(self) -> str:
        """Return what a form of our pages sends with what changes something."""
        return self.derived("form")

    def derived(self, what: str) -> str:
        return hmac.new(self.key, what.encode(), hashlib.sha256).hexdigest()

    async def __call__(
        self, request: Request, go_on: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request (as middleware): only those who know the token are let through."""
        response = self.judge(request) or await go_on(request)
        response.headers.update(HEADERS)
        return response

    def judge(self, request: Request) -> Response | None:
        """Return the answer to a client that may not pass; None for one that may."""
        if not is_this_machine(request.headers.get("host", ""), self.names):
            return PlainTextResponse("this server has another name; see --name\n", 421)
        token = request.query_params.get("token")
        if token is not None and request.method == "GET":
            return self.enter(token, request.url.path)
        session = request.cookies.get(self.cookie, "")
        if not (same(session, self.derived("session")) or self.bears_token(request)):
            return PlainTextResponse(REFUSED, 401)
        return None

    def enter(self, token: str, path: str) -> Response:
        """Give the cookie for the token; a page of ours then asks for what was meant."""
        if not same(token, self.token):
            return PlainTextResponse(REFUSED, 401)
        url = html.escape("/" + quote(path.lstrip("/\\")))
        answer = HTMLResponse(f'<!doctype html><meta http-equiv="refresh" content="0;url={url}">')
        session = self.derived("session")
        answer.set_cookie(self.cookie, session, httponly=True, samesite="strict", path="/")
        return answer

    def bears_token(self, request: Request) -> bool:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and same(token.strip(), self.token)

    def may_change(self, request: Request, form: str) -> bool:
        """Return True if a POST is from a page of ours, or from a script that has the token."""
        headers = request.headers
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", ""):
            return False
        return self.bears_token(request) or same(form, self.form)


def same(shown: str, wanted: str) -> bool:
    """Compare in a time that tells nothing of what is equal."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), wanted.encode())
