"""Decides who may see the pages, and who may change something. Pure.

Every user of this machine can connect to a loopback port, and any page that a browser shows can
send it requests. So there is a token always; a name that somebody else's DNS may hold is no name
of ours; and what changes something must come from a page of ours.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


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
    def session(self) -> str:
        return self.derived("session")

    @property
    def form(self) -> str:
        """Return what a page of ours sends with what changes something."""
        return self.derived("form")

    def derived(self, what: str) -> str:
        return hmac.new(self.key, what.encode(), hashlib.sha256).hexdigest()

    def is_token(self, token: str) -> bool:
        return same(token, self.token)

    def knows(self, cookies: Mapping[str, str], authorization: str) -> bool:
        """Tell whether a request is from a browser that has shown the token, or shows it itself."""
        if same(cookies.get(self.cookie, ""), self.session):
            return True
        kind, _, token = authorization.partition(" ")
        return kind.lower() == "bearer" and self.is_token(token.strip())

    def may_change(self, headers: Mapping[str, str]) -> bool:
        """Tell whether a POST is from a page of ours, or from a script that has the token."""
        site = headers.get("sec-fetch-site", "same-origin")
        origin = headers.get("origin")
        if site not in ("same-origin", "none"):
            return False
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", ""):
            return False
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self.is_token(token.strip())
        return same(headers.get("x-orchestrator-form", ""), self.form)


def same(shown: str, wanted: str) -> bool:
    """Compare in a time that tells nothing of what is equal."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), wanted.encode())
