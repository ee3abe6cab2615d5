"""The environments of this node: where they are, what is in them, and whether they are whole.

An environment is made where it stays, because its scripts hold its path; it counts once its file
`ready.json` is written, and whoever finds none there begins anew. Links with names lead to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator

from orchestrator.common import files
from orchestrator.common.permissions import may_rename, others
from orchestrator.node.job.run_directory import all_runs, home
from orchestrator.protocol.events import Ended

KEY = re.compile(r"[0-9a-f]{16}")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,60}")
NEWEST = "newest"
READY = "ready.json"
INSTALLED = re.compile(r"(.+?)-([^-]+)\.dist-info")


class Environments:
    """The directory that holds the environments of this node."""

    def __init__(self, root: str = "") -> None:
        self.root = os.path.abspath(
            os.path.expanduser(root or os.path.join(home(), "environments"))
        )

    def prepare(self) -> None:
        """Make the directory; refuse one in which somebody else could change what runs."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        for path, problem in loose_levels(self.root):
            raise ValueError(
                f"{path} {problem}, who could replace the programs of {self.root}: name another"
                " directory with --into"
            )
        if os.statvfs(self.root).f_flag & os.ST_NOEXEC:
            raise ValueError(
                f"{self.root} is on a disk mounted noexec, from which no library can be loaded:"
                " name another directory with --into"
            )

    def path(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise ValueError(f"not the key of an environment: {key[:60]!r}")
        return os.path.join(self.root, key)

    def link(self, name: str, key: str) -> None:
        """Let a name lead to an environment, at once for whoever looks."""
        if not NAME.fullmatch(name):
            raise ValueError(f"not the name of an environment: {name[:60]!r}")
        path = os.path.join(self.root, name)
        if os.path.lexists(path) and not os.path.islink(path):
            raise ValueError(f"{path} is there and is not a link to an environment")
        new = os.path.join(self.root, f".{name}.{os.urandom(4).hex()}")
        os.symlink(key, new)
        os.replace(new, path)

    def link_all(self, name: str, key: str) -> None:
        """Let the newest's name lead to an environment, and its own, where it has one."""
        for each in dict.fromkeys([NEWEST, *filter(None, [name])]):
            self.link(each, key)

    def packages(self, key: str) -> dict[str, str] | None:
        """Return what is installed; None where the environment is not whole, or was changed."""
        path = self.path(key)
        try:
            with files.open_plain(os.path.join(path, READY)) as file:
                noted = json.loads(file.read())
            if noted["measure"] == measure(path) and os.access(f"{path}/bin/python", os.X_OK):
                return dict(noted["packages"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def seal(self, key: str) -> None:
        """Note that an environment is whole, and what is in it."""
        path = self.path(key)
        noted = {"packages": installed(path), "measure": measure(path)}
        files.replace(os.path.join(path, READY), json.dumps(noted))

    def discard(self, key: str) -> None:
        """Remove what an interrupted bootstrap left, or what somebody changed."""
        path = self.path(key)
        if os.path.lexists(path):
            self._remove(key)
        shutil.rmtree(f"{path}.cache", ignore_errors=True)  # of uv

    def _remove(self, key: str) -> list[int]:
        """Remove an environment, whole for whoever looks; return the bytes of its files."""
        freed: list[int] = []
        hidden = os.path.join(self.root, files.hidden_name(key))
        files.hide(os.path.join(self.root, key), hidden)
        files.delete(hidden, freed.append)
        return freed

    def prune(self) -> tuple[list[str], int]:
        """Remove the environments that no name leads to and no job uses; return them, and bytes."""
        freed: list[int] = []
        removed = []
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return [], 0
        kept = {os.readlink(p) for n in names if os.path.islink(p := os.path.join(self.root, n))}
        used = pythons_of_jobs()
        for name in sorted(names):
            path = os.path.join(self.root, name)
            if KEY.fullmatch(name) and name not in kept and os.path.isdir(path):
                if not any(python.startswith(f"{path}/") for python in used):
                    freed += self._remove(name)
                    removed.append(name)
                    with contextlib.suppress(OSError):
                        os.unlink(f"{path}.lock")
            elif name.startswith(".") and files.GONE in name:
                files.delete(path, freed.append)
        return removed, sum(freed)


def loose_levels(root: str) -> Iterator[tuple[str, str]]:
    """Yield the directories in which somebody else could replace what runs, and why."""
    real = os.path.realpath(root)
    levels = {os.path.dirname(root): may_rename, os.path.dirname(real): may_rename, real: others}
    for path, judge in levels.items():
        if problem := judge(os.stat(path)):
            yield path, problem


def pythons_of_jobs() -> list[str]:
    """Return the Pythons of the jobs that may still run."""
    pythons = []
    for run in all_runs():
        if run.last(Ended) is None:
            try:
                pythons.append(run.read_spec().agent[0])
            except (OSError, ValueError, IndexError):
                raise ValueError(
                    f"job {run.job} cannot be read there, and may use any environment"
                ) from None
    return pythons


def site_packages(path: str) -> str:
    """Return the directory of an environment that packages are in."""
    library = os.path.join(path, "lib")
    for name in sorted(os.listdir(library)):
        if name.startswith("python"):
            return os.path.join(library, name, "site-packages")
    raise ValueError(f"{path} has no site-packages")


def installed(path: str) -> dict[str, str]:
    """Return name -> version of all packages, by the directories that installers leave."""
    found = {}
    for name in os.listdir(site_packages(path)):
        match = INSTALLED.fullmatch(name)
        if match:
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return dict(sorted(found.items()))


def measure(path: str) -> list[int]:
    """Count files and bytes: what somebody installs, removes or edits later changes these."""
    count = size = 0
    directories = [site_packages(path)]
    while directories:  # os.walk() and lstat() take twice as long: 0.2 s for torch
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                if not entry.is_dir():
                    size += entry.stat(follow_symlinks=False).st_size
                    count += 1
                elif not entry.is_symlink() and entry.name != "__pycache__":
                    directories.append(entry.path)
    return [count, size]
