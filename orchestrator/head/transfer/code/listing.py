"""List what of a directory travels: git's files where it is a work tree, else all but the usual.

Paths are bytes below the directory. Nothing is read here but directories.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

GIT_SECONDS = 60.0
NO_PROGRAMS = ("-c", "core.fsmonitor=false")  # which a repository's own settings would name
OURS = b".orchestrator-"  # in the user's directory: what we write there is no code
MARKER = OURS + b"marker-"
# Never part of a tree, whoever tracks it: it is made anew,
MADE = frozenset(
    b"__pycache__ .git .hg .svn .venv node_modules .mypy_cache .pytest_cache .ruff_cache .tox .nox"
    b" .ipynb_checkpoints".split()
)
# or belongs to one person, or to one machine. Where git has such a thing it is said.
PRIVATE = frozenset(b".cache .local .orchestrator .ssh .gnupg .aws .netrc .git-credentials".split())
NEVER = MADE | PRIVATE
# Without git nobody says what is a product; these are, by their names.
PRODUCTS = frozenset(b"venv env build dist checkpoints wandb mlruns tensorboard outputs".split())


@dataclass(frozen=True)
class Rules:
    """The user's choice of what travels."""

    include: tuple[str, ...] = ()  # patterns
    exclude: tuple[str, ...] = ()
    apart: tuple[bytes, ...] = ()  # directories below that never travel: the experiments
    always: tuple[bytes, ...] = ()  # paths that travel in any case: the program
    everything: bool = False  # a directory that holds nothing else: the code of an earlier run


@dataclass(frozen=True)
class Listed:
    """The paths that travel, in order, and what has to be said of them."""

    paths: list[bytes]
    notes: tuple[str, ...] = ()


def never() -> bool:
    return False


def list_tree(directory: bytes, rules: Rules, over: Callable[[], bool] = never) -> Listed:
    """List the files, links and, without git, empty directories that travel.

    over() says that nobody waits for the list any more: it is then incomplete.
    """
    if rules.everything:
        return Listed(sorted(walk(directory, b"", frozenset())))
    by_git, why_not = git_files(directory)
    paths = set(by_git) if by_git is not None else set(walk(directory, b"", NEVER | PRODUCTS, over))
    excluded = matcher(rules.exclude)
    paths = {path for path in paths if not excluded(path)}
    private = {path for path in paths if not PRIVATE.isdisjoint(path.split(b"/"))}
    paths -= private
    for pattern in rules.include:
        paths.update(included(directory, pattern))
    apart = tuple(path + b"/" for path in rules.apart)
    kept = (path for path in paths if path not in rules.apart and not path.startswith(apart))
    listed = {path for path in kept if b"/" + OURS not in b"/" + path}
    listed.update(path for path in rules.always if os.path.lexists(os.path.join(directory, path)))
    notes = [why_not, stays_here(set(map(private_part, private - listed)))]
    return Listed(sorted(listed), tuple(filter(None, notes)))


def private_part(path: bytes) -> bytes:
    """Return the part of a path that ends with its first private name."""
    parts = path.split(b"/")
    end = next(index for index, part in enumerate(parts, 1) if part in PRIVATE)
    return b"/".join(parts[:end])


def stays_here(paths: set[bytes]) -> str:
    """Say what is private and does not travel, or nothing."""
    names = [repr(os.fsdecode(path))[1:-1] for path in sorted(paths)]
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    them = "it" if len(names) == 1 else "them"
    return f"warning: not sent: {shown}; git does not ignore {them}, sync.include sends {them}"


# -- git --------------------------------------------------------------------------------------


def git_files(directory: bytes) -> tuple[list[bytes] | None, str]:
    """Return git's files below a directory; None where git does not say, and why if it should."""
    command = ["git", *NO_PROGRAMS, "--no-optional-locks", "-C", os.fsdecode(directory), "ls-files"]
    try:
        done = subprocess.run(
            [*command, "--cached", "--others", "--exclude-standard", "-z"],
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return None, "git is not installed here" if in_work_tree(directory) else ""
    except subprocess.TimeoutExpired:
        return None, f"git lists no files within {GIT_SECONDS:g} s"
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        return None, f"git lists no files: {reason}" if in_work_tree(directory) else ""
    paths = [path for path in done.stdout.split(b"\0") if path]
    if not paths:
        return None, ""  # a directory that git ignores as a whole
    files: list[bytes] = []
    for path in paths:
        parts = path.rstrip(b"/").split(b"/")
        if not MADE.isdisjoint(parts):
            continue
        if path.endswith(b"/") or is_directory(os.path.join(directory, path)):
            inner = os.path.join(directory, path.rstrip(b"/"))  # a submodule, or another's clone
            within, _ = git_files(inner)
            found = within if within is not None else walk(inner, b"", NEVER)
            files += [os.path.join(path.rstrip(b"/"), name) for name in found]
        else:
            files.append(path)
    return files, ""


def in_work_tree(directory: bytes) -> bool:
    """Tell whether there is a .git here or above."""
    while True:
        if os.path.lexists(os.path.join(directory, b".git")):
            return True
        above = os.path.dirname(directory)
        if above == directory:
            return False
        directory = above


def is_directory(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


# -- without git ------------------------------------------------------------------------------


def walk(
    directory: bytes,
    below: bytes,
    ignored: frozenset[bytes],
    over: Callable[[], bool] = never,
) -> Iterator[bytes]:
    """Yield what a directory holds, empty directories too, but for names that are ignored."""
    pending = [below]
    while pending and not over():
        here = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(directory, here)))
        except PermissionError:
            continue  # another's; a program that needs it will say so
        kept = [entry for entry in entries if entry.name not in ignored]
        if not entries and here:
            yield here
        for entry in kept:
            path = os.path.join(here, entry.name)
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
            else:
                yield path


# -- patterns ---------------------------------------------------------------------------------


def matcher(patterns: Iterable[str]) -> Callable[[bytes], bool]:
    """Return what tells whether a path, or a directory above it, fits one of the patterns.

    A pattern without a slash fits a name at any depth, one with a slash a path from the top.
    """
    rows = [os.fsencode(pattern.strip("/")) for pattern in patterns]
    names = [row for row in rows if b"/" not in row]
    whole = [row for row in rows if b"/" in row]

    def fits(path: bytes) -> bool:
        parts = path.split(b"/")
        if any(fnmatch.fnmatchcase(part, name) for part in parts for name in names):
            return True
        heads = [b"/".join(parts[: count + 1]) for count in range(len(parts))]
        return any(fnmatch.fnmatchcase(head, row) for head in heads for row in whole)

    return fits if rows else lambda path: False


def included(directory: bytes, pattern: str) -> Iterator[bytes]:
    """Yield what a pattern of `include` names, whatever git says of it."""
    wanted = os.fsencode(pattern.strip("/"))
    for path in glob.iglob(wanted, root_dir=directory, recursive=True):
        if is_directory(os.path.join(directory, path)):
            yield from walk(directory, path, NEVER)
        elif os.path.lexists(os.path.join(directory, path)):
            yield path
