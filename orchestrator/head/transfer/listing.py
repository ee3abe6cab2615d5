"""List the files of a directory to send: git's in a work tree, else all but common products.

Paths are bytes, relative to the directory. Only directories are read here, no files.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import CheckFailed

GIT_SECONDS = 60.0
# A repository's own settings could name a program for git to run.
NO_PROGRAMS = ("-c", "core.fsmonitor=false")
# Files with this prefix are written by us into the user's directory, and are not code.
OURS = b".orchestrator-"
# These are never sent, even if git tracks them, because they are created on each machine.
MADE = frozenset(
    b"__pycache__ .git .hg .svn .venv node_modules .mypy_cache .pytest_cache .ruff_cache .tox .nox"
    b" .ipynb_checkpoints".split()
)
# These are never sent because they belong to one machine.
LOCAL = frozenset(b".cache .local .orchestrator".split())
# These are never sent because they are personal: keys, passwords, tokens. Each one is reported.
PERSONAL = frozenset(
    b".ssh .gnupg .aws .azure .config .docker .dockercfg .kaggle .kube"
    b" .huggingface .netrc .npmrc .pypirc .pgpass .s3cfg .boto .git-credentials .env .envrc"
    b" kaggle.json".split()
)
PRIVATE = PERSONAL | LOCAL
KEY_FILES = re.compile(
    rb".+\.(pem|p12|pfx|ppk)|id_(rsa|dsa|ecdsa|ed25519)(_sk)?"
    rb"|\.env\.(?!(example|sample|template|dist|defaults?)$).+"
    rb"|(?!(example|sample|template|dist|defaults?)\.).+\.env"
)
MOST_NAMED = 10
# Without git, directories with these names count as products.
PRODUCTS = frozenset(b"venv env build dist checkpoints wandb mlruns tensorboard outputs".split())


@dataclass(frozen=True)
class Rules:
    """The user's rules on which files are sent."""

    # The largest sizes of a file and of a tree that are sent, in megabytes.
    largest_file: float = 200.0
    largest_tree: float = 2000.0
    # Patterns of paths.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    # Relative paths that are never sent: experiments and files with secrets.
    apart: tuple[bytes, ...] = ()
    # Relative paths that are always sent: the program.
    always: tuple[bytes, ...] = ()
    # True if the directory holds only code, that of an earlier run.
    everything: bool = False


def list_tree(
    directory: bytes, rules: Rules, over: Callable[[], bool] = lambda: False
) -> tuple[list[bytes], list[str]]:
    """Return the paths to send (files, links and, without git, empty directories), and warnings.

    Once over() returns True the listing stops, and is incomplete.
    """
    if rules.everything:
        return sorted(walk(directory, b"")), []
    by_git = git_files(directory)
    found = walk(directory, b"", MADE | LOCAL | PRODUCTS, over) if by_git is None else by_git
    excluded = matcher(rules.exclude)
    paths = {path for path in found if not excluded(path)}
    private = set(filter(private_part, paths))
    asked = set[bytes]()
    for top, path in included(directory, rules.include):
        (private if private_part(path[len(top) :]) else asked).add(path)
    apart = tuple(path + b"/" for path in rules.apart)
    listed = {
        path
        for path in (paths - private) | asked
        if not (path + b"/").startswith(apart) and b"/" + OURS not in b"/" + path
    }
    listed.update(path for path in rules.always if os.path.lexists(os.path.join(directory, path)))
    return sorted(listed), stays_here({private_part(path) for path in private - listed})


def private_part(path: bytes) -> bytes:
    """Return the path up to its first private name, b"" if it has none."""
    parts = path.split(b"/")
    for end, part in enumerate(parts, 1):
        if part in PRIVATE or KEY_FILES.fullmatch(part):
            return b"/".join(parts[:end])
    return b""


def stays_here(paths: set[bytes]) -> list[str]:
    """Return a warning on the private files that are not sent, [] if there are none."""
    if not paths:
        return []
    names = [repr(os.fsdecode(path))[1:-1] for path in sorted(paths)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    sends = "sends it" if len(names) == 1 else "sends the first"
    return [
        f"warning: not sent, because it is private: {', '.join(names[:MOST_NAMED])}{more};"
        f" --set 'sync.include=[{names[0]}]' {sends}"
    ]


def git_files(directory: bytes) -> list[bytes] | None:
    """Return git's files below a directory, None outside of a work tree or without git.

    Raises CheckFailed if git fails in a work tree: ignored files would be sent as well.
    """
    where = Path(os.fsdecode(directory))
    command = ["git", *NO_PROGRAMS, "--no-optional-locks", "-C", str(where), "ls-files"]
    try:
        done = subprocess.run(
            [*command, "--cached", "--others", "--exclude-standard", "-z"],
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        code, reason = done.returncode, done.stderr.decode(errors="replace").partition("\n")[0]
        paths = [path for path in done.stdout.split(b"\0") if path]
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        code, reason, paths = 1, f"it takes longer than {GIT_SECONDS:g} s", []
    if code and any((place / ".git").exists() for place in (where, *where.parents)):
        raise CheckFailed(
            f"git does not say which files of {where} are code: {reason}",
            f"git config --global --add safe.directory {shlex.quote(str(where))}"
            if "ownership" in reason
            else f"try it: git -C {shlex.quote(str(where))} ls-files",
        )
    if not paths:
        # This is no work tree, or git ignores the directory as a whole.
        return None
    files: list[bytes] = []
    for path in (path.rstrip(b"/") for path in paths):
        if not MADE.isdisjoint(path.split(b"/")):
            continue
        inner = os.path.join(directory, path)
        # The directory is a submodule or another clone.
        if os.path.isdir(inner) and not os.path.islink(inner):
            within = git_files(inner)
            found = walk(inner, b"", MADE) if within is None else within
            files += [os.path.join(path, name) for name in found]
        else:
            files.append(path)
    return files


def walk(
    directory: bytes,
    below: bytes,
    ignored: frozenset[bytes] = frozenset(),
    over: Callable[[], bool] = lambda: False,
) -> Iterator[bytes]:
    """Yield the paths below a directory except ignored names; empty directories are included.

    If any names are ignored, a private directory is yielded itself instead of its content.
    """
    pending = [below]
    while pending and not over():
        here = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(directory, here)))
        except PermissionError:
            # The directory is another user's. A program that needs it will fail by itself.
            continue
        if not entries and here:
            yield here
        for entry in entries:
            path = os.path.join(here, entry.name)
            if entry.name in ignored:
                continue
            whole = bool(ignored and private_part(entry.name))
            if entry.is_dir(follow_symlinks=False) and not whole:
                pending.append(path)
            else:
                yield path


def matcher(patterns: Iterable[str]) -> Callable[[bytes], bool]:
    """Return a predicate: True if a path or a directory above it matches one of the patterns.

    A pattern without a slash matches a name at any depth, one with a slash a path from the top.
    """
    rows = [os.fsencode(pattern.strip("/")) for pattern in patterns]

    def fits(path: bytes) -> bool:
        parts = path.split(b"/")
        heads = [b"/".join(parts[: count + 1]) for count in range(len(parts))]
        return any(
            fnmatch.fnmatchcase(each, row)
            for row in rows
            for each in (heads if b"/" in row else parts)
        )

    return fits


def included(directory: bytes, patterns: Iterable[str]) -> Iterator[tuple[bytes, bytes]]:
    """Yield (match, path) for each match of the patterns and each file below it, ignored or not."""
    for pattern in patterns:
        wanted = os.fsencode(pattern.strip("/"))
        for top in glob.iglob(wanted, root_dir=directory, recursive=True):
            whole = os.path.join(directory, top)
            if os.path.isdir(whole) and not os.path.islink(whole):
                yield from ((top, path) for path in walk(directory, top, MADE))
            elif os.path.lexists(whole):
                yield top, top
