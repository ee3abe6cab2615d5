"""The environment of a node's programs: its Python, its activation, its container."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import UsageError

# As an activation or a wrapper: the login's own, even where one is set for all nodes.
NONE = "none"
MODULE = r"[\w./+][\w./+=:-]*"
ACTIVATIONS = (
    r"none|bootstrap(:[A-Za-z][\w.-]*)?|(venv|script):[/~].*|conda:[\w/~].*"
    rf"|module:{MODULE}([, ]+{MODULE})*"
)
ACTIVATION_FORMS = "venv:/path, conda:NAME, module:NAME,NAME, script:/path or bootstrap"


@dataclass(frozen=True)
class Environment:
    """The Python, activation and container of a node's programs; None: as the login has it."""

    python: str | None = None
    activate: str | None = None
    wrap: str | None = None


def check_environment(activate: str | None, wrap: str | None) -> None:
    """Raise UsageError for an invalid --activate or --wrap."""
    if activate is not None and not (
        re.fullmatch(ACTIVATIONS, activate, re.ASCII) and activate.isprintable()
    ):
        raise UsageError(
            f"--activate {activate!r}: not a known form of activation", f"write {ACTIVATION_FORMS}"
        )
    if wrap is not None and not (wrap.strip() and wrap.isprintable()):
        raise UsageError(
            f"--wrap {wrap!r}: this is not a command", "write --wrap 'docker exec -i NAME'"
        )


def absolute_activation(activate: str | None) -> str | None:
    """Return an activation whose relative path is made absolute; others are unchanged."""
    kind, colon, path = (activate or "").partition(":")
    if kind not in ("venv", "script") or not colon or not path or path[0] in "/~":
        return activate
    return f"{kind}:{os.path.normpath(Path.cwd() / path)}"
