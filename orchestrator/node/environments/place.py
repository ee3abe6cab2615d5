"""The environments of this node: their paths, their packages, and whether they are complete.

An environment is built in its final place, because its scripts contain its path. It counts once its
file `ready` exists; without it the next bootstrap rebuilds it. Links with names lead
to it.
"""

from __future__ import annotations

import glob
import os
import re
import shutil

from orchestrator.common import files
from orchestrator.common.permissions import loose_levels

KEY = re.compile(r"[0-9a-f]{16}")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,60}")
NEWEST = "newest"
READY = "ready"
INSTALLED = re.compile(r"(.+?)-([^-]+)\.dist-info")


class Environments:
    """The directory that holds the environments of this node."""

    def __init__(self) -> None:
        self.root = os.path.abspath(os.path.join(files.our_directory(), "environments"))

    def prepare(self) -> None:
        """Create the directory; refuse one in which other users could replace programs."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        for path, problem in loose_levels(self.root):
            raise ValueError(
                f"{path} {problem}, who could replace the programs of {self.root}: name another"
                " directory with ORCHESTRATOR_HOME in the node's environment"
            )

    def path(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise ValueError(f"not the key of an environment: {key[:60]!r}")
        return os.path.join(self.root, key)

    def link_all(self, name: str, key: str) -> None:
        """Point the links `newest` and `name`, if one is given, to an environment."""
        for each in dict.fromkeys([NEWEST, name or NEWEST]):
            if not NAME.fullmatch(each):
                raise ValueError(f"not the name of an environment: {each[:60]!r}")
            path = os.path.join(self.root, each)
            if os.path.lexists(path) and not os.path.islink(path):
                raise ValueError(f"{path} is there and is not a link to an environment")
            new = os.path.join(self.root, f".{each}.{os.urandom(4).hex()}")
            os.symlink(key, new)
            os.replace(new, path)

    def packages(self, key: str) -> dict[str, str] | None:
        """Return the installed packages, or None if the environment is incomplete."""
        path = self.path(key)
        whole = os.path.exists(os.path.join(path, READY)) and os.access(
            f"{path}/bin/python", os.X_OK
        )
        return installed_packages(path) if whole else None

    def seal(self, key: str) -> None:
        """Mark an environment as complete."""
        files.replace_file(os.path.join(self.path(key), READY), "")

    def discard(self, key: str) -> None:
        """Remove an incomplete environment; it disappears for other processes at once."""
        path = self.path(key)
        if os.path.lexists(path):
            hidden = os.path.join(self.root, files.hidden_name(key))
            files.hide_directory(path, hidden)
            files.delete_directory(hidden)
        # The cache of uv lies beside the environment.
        shutil.rmtree(f"{path}.cache", ignore_errors=True)


def installed_packages(path: str) -> dict[str, str]:
    """Return version by name of all packages, from the directories that installers leave."""
    found = {}
    for place in glob.glob(f"{glob.escape(path)}/lib/python*/site-packages/*.dist-info"):
        match = INSTALLED.fullmatch(os.path.basename(place))
        if match:
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return dict(sorted(found.items()))
