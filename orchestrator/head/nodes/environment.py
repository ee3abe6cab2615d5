"""The environment of a node's programs: its Python, what activates it, the container around it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.records import machines
from orchestrator.records.machines import ListedNode, machine_of

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
            f"--wrap {wrap!r}: this is not a command", "write --wrap 'docker exec -i NAME'"
        )


def absolute(activate: str | None) -> str | None:
    """Name a virtual environment or a file of this directory by the path that nodes know it by."""
    kind, colon, path = (activate or "").partition(":")
    if kind not in ("venv", "script") or not colon or not path or path[0] in "/~":
        return activate
    return f"{kind}:{os.path.normpath(Path.cwd() / path)}"


def chosen(of_node: str | None, usual: str | None = None) -> str | None:
    """Return the setting of a node, or that of all; `none` in the list stands for neither."""
    setting = of_node or usual
    return None if setting == NONE else setting


# -- remembered ---------------------------------------------------------------------------------
# What `orchestrator bootstrap` made last, for machines whose own Python has no torch: no launch
# could run there without.

REMEMBERED = "activations.json"

Activations = dict[str, str]  # by machine


def remembered(node: ListedNode) -> str:
    """Return how the newest environment of a node is activated; nothing where there is none."""
    return machines.read(REMEMBERED, Activations).get(machine_of(node), "")


def remember(new: Mapping[str, str]) -> None:
    """Note the activation of each of these machines."""
    with machines.changing(REMEMBERED, Activations) as known:
        known.update(new)
