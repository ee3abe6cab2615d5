"""The hashes that a user wrote into requirements: what is installed has to have them.

uv names all hashes that the index has of a version; of these the user's stay, and pip checks them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from orchestrator.common.errors import CheckFailed

HASH = re.compile(r"\s*\\?\s*--hash[= ](sha256|sha384|sha512):([0-9A-Fa-f]+)")
NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")

Hashes = Mapping[str, frozenset[str]]  # a package, and algorithm:digest of each file allowed


def wanted(text: bytes) -> Hashes:
    """Return the hashes of a requirements file, and of the files that it includes."""
    found: dict[str, frozenset[str]] = {}
    for line in requirements(text.decode(errors="replace").replace("\0", "\n")):
        name = NAME.match(line)
        allowed = frozenset(f"{kind}:{value.lower()}" for kind, value in HASH.findall(line))
        if name and allowed:
            key = normal(name[1])
            found[key] = found.get(key, frozenset()) | allowed
    return found


def requirements(text: str) -> list[str]:
    """Return the lines, with those that a backslash continues put together."""
    return [line for line in re.sub(r"\\\r?\n", " ", text).splitlines() if line.strip()]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def keep(pinned: str, allowed: Hashes, what: str) -> str:
    """Leave of the hashes that an index names for each version those that the user allows."""
    lines = []
    for line in requirements(pinned):
        name = NAME.match(line)
        theirs = allowed.get(normal(name[1])) if name else None
        if theirs is None:
            lines.append(line)
            continue
        hashes = sorted(theirs & {f"{kind}:{value}" for kind, value in HASH.findall(line)})
        if not hashes:
            raise CheckFailed(
                f"{what}:\n    none of the hashes of {line.split()[0]} in the file is one"
                " of the index",
                "do not install it before you know why; after an intended change, write the file's"
                " hashes anew (uv pip compile --generate-hashes, pip hash WHEEL)",
            )
        lines.append(" ".join([HASH.sub("", line).strip(), *(f"--hash={each}" for each in hashes)]))
    return "\n".join(lines) + "\n"
