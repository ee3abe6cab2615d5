"""The environment of a node's programs: its Python, what activates it, the container around it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.common.errors import UsageError

NONE = "none"  # in the node list: not what the other nodes have
MODULE = r"[\w./+][\w./+=:-]*"
ACTIVATIONS = (
    r"none|bootstrap(:[A-Za-z][\w.-]*)?|(venv|script):[/~].*|conda:[\w/~].*"
    rf"|module:{MODULE}([, ]+{MODULE})*"
)
ACTIVATION_FORMS = "venv:/path, conda:NAME, module:NAME,NAME, script:/path or bootstrap"


@dataclass(frozen=True)
class Environment:
    """The surroundings of the programs that start on a node; where there are none, its login."""

    python: str | None = None
    activate: str | None = None
    wrap: str | None = None


def check(activate: str | None, wrap: str | None) -> None:
    """Refuse an activation that no node could understand."""
    if activate is not None and not (
        re.fullmatch(ACTIVATIONS, activate, re.ASCII) and activate.isprintable()
    ):
        raise UsageError(
            f"--activate {activate!r}: nothing is known to activate so", f"write {ACTIVATION_FORMS}"
        )
    if wrap is not None and not (wrap.strip() and wrap.isprintable()):
        raise UsageError(
            f"--wrap {wrap!r}: this is no command", "write --wrap 'docker exec -i NAME'"
        )


def chosen(of_node: str | None, usual: str | None = None) -> str | None:
    """Return the setting of a node, or that of all; `none` in the list stands for neither."""
    setting = of_node or usual
    return None if setting == NONE else setting
