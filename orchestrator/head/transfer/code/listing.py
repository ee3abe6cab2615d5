"""List what of a directory travels: git's files where it is a work tree, else all but the usual.

Paths are bytes below the directory. Nothing is read here but directories.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from orchestrator.common.errors import CheckFailed

GIT_SECONDS = 60.0
NO_PROGRAMS = ("-c", "core.fsmonitor=false")  # which a repository's own settings would name
OURS = b".orchestrator-"  # in the user's directory: what we write there is no code
MARKER = OURS + b"marker-"
# Never part of a tree, whoever tracks it: it is made anew,
MADE = frozenset(
    b"__pycache__ .git .hg .svn .venv node_modules .mypy_cache .pytest_cache .ruff_cache .tox .nox"
    b" .ipynb_checkpoints".split()
)
# or belongs to one machine,
LOCAL = frozenset(b".cache .local .orchestrator".split())
# or to one person: keys, passwords, and the tokens of hubs and clouds. Each is said.
PERSONAL = frozenset(
    b".ssh .gnupg .aws .azure .config .docker .dockercfg .kaggle .kube .huggingface .netrc .npmrc"
    b" .pypirc .pgpass .s3cfg .boto .git-credentials .env .envrc kaggle.json".split()
)
KEY_FILES = re.compile(
    rb".+\.(pem|p12|pfx|ppk)|id_(rsa|dsa|ecdsa|ed25519)(_sk)?"
    rb"|\.env\.(?!(example|sample|template|dist|defaults?)$).+"
    rb"|(?!(example|sample|template|dist|defaults?)\.).+\.env"
)
MOST_NAMED = 10
# Without git nobody says what is a product; these are, by their names.
PRODUCTS = frozenset(b"venv env build dist checkpoints wandb mlruns tensorboard outputs".split())


@dataclass(frozen=True)
class Rules:
    """The user's choice of what travels."""

    include: tuple[str, ...] = ()  # patterns
    exclude: tuple[str, ...] = ()
    apart: tuple[bytes, ...] = ()  # paths below that never travel: experiments, files of secrets
    always: tuple[bytes, ...] = ()  # paths that travel in any case: the program
    everything: bool = False  # a directory that holds nothing else: the code of an earlier run


@dataclass(frozen=True)
class Listed:
    """The paths that travel, in order, and what has to be said of them."""

    paths: list[bytes]
    notes: tuple[str, ...] = ()
    asked: frozenset[bytes] = frozenset()  # paths that the user named


def never() -> bool:
    return False


def list_tree(directory: bytes, rules: Rules, over: Callable[[], bool] = never) -> Listed:
    """List the files, links and, without git, empty directories that travel.

    over() says that nobody waits for the list any more: it is then incomplete.
    """
    if rules.everything:
        return Listed(sorted(walk(directory, b"")))
    by_git, why_not = git_files(directory)
    paths = set(walk(directory, b"", MADE | LOCAL | PRODUCTS, over) if by_git is None else by_git)
    excluded = matcher(rules.exclude)
    paths = {path for path in paths if not excluded(path)}
    private = {path for path in paths if is_private(path)}
    asked = set[bytes]()
    for top, path in included(directory, rules.include):
        (private if is_private(path[len(top) :]) else asked).add(path)
    apart = tuple(path + b"/" for path in rules.apart)
    listed = {
        path
        for path in (paths - private) | asked
        if not (path + b"/").startswith(apart) and b"/" + OURS not in b"/" + path
    }
    always = {path for path in rules.always if os.path.lexists(os.path.join(directory, path))}
    listed |= always
    notes = [why_not, stays_here(set(map(private_part, private - listed)))]
    return Listed(sorted(listed), tuple(filter(None, notes)), frozenset(asked | always))


def is_private(path: bytes) -> bool:
    """Tell whether a name in a path says that it belongs to one person, or to one machine."""
    return any(is_private_name(part) for part in path.split(b"/"))


def is_private_name(name: bytes) -> bool:
    return name in PERSONAL or name in LOCAL or bool(KEY_FILES.fullmatch(name))


def private_part(path: bytes) -> bytes:
    """Return the part of a path that ends with its first private name."""
    parts = path.split(b"/")
    end = next(index for index, part in enumerate(parts, 1) if is_private_name(part))
    return b"/".join(parts[:end])


def stays_here(paths: set[bytes]) -> str:
    """Say what is private and does not travel, or nothing."""
    names = [repr(os.fsdecode(path))[1:-1] for path in sorted(paths)]
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    one = f"--set 'sync.include=[{names[0]}]'"
    sends = f"{one} sends it" if len(names) == 1 else f"{one} sends the first"
    return (
        f"warning: not sent, because it is private: {', '.join(names[:MOST_NAMED])}{more}; {sends}"
    )


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
        if in_work_tree(directory):
            raise refused(directory, done.stderr.decode(errors="replace"))
        return None, ""
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
            found = within if within is not None else walk(inner, b"", MADE)
            files += [os.path.join(path.rstrip(b"/"), name) for name in found]
        else:
            files.append(path)
    return files, ""


def refused(directory: bytes, stderr: str) -> CheckFailed:
    """Say why git lists nothing: without its list, what git ignores would travel, too."""
    reason = stderr.strip().partition("\n")[0]
    where = os.fsdecode(directory)
    return CheckFailed(
        f"git does not say which files of {where} are code: {reason}",
        f"git config --global --add safe.directory {shlex.quote(where)}"
        if "ownership" in reason
        else f"try it: git -C {shlex.quote(where)} ls-files",
    )


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
    ignored: frozenset[bytes] = frozenset(),
    over: Callable[[], bool] = never,
) -> Iterator[bytes]:
    """Yield what a directory holds, empty directories too, but for names that are ignored.

    Where some names are ignored, a private directory is yielded in place of what it holds.
    """
    pending = [below]
    while pending and not over():
        here = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(directory, here)))
        except PermissionError:
            continue  # another's; a program that needs it will say so
        if not entries and here:
            yield here
        for entry in entries:
            path = os.path.join(here, entry.name)
            if entry.name in ignored:
                continue
            if entry.is_dir(follow_symlinks=False) and not (
                ignored and is_private_name(entry.name)
            ):
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


def included(directory: bytes, patterns: Iterable[str]) -> Iterator[tuple[bytes, bytes]]:
    """Yield what each pattern of `include` names, and each file below it, whatever git says."""
    for pattern in patterns:
        wanted = os.fsencode(pattern.strip("/"))
        for top in glob.iglob(wanted, root_dir=directory, recursive=True):
            if is_directory(os.path.join(directory, top)):
                yield from ((top, path) for path in walk(directory, top, MADE))
            elif os.path.lexists(os.path.join(directory, top)):
                yield top, top
