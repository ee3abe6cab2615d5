"""Finds packages that this Python imports from the node's own copy of the code that was sent.

`pip install -e .` in each node's clone makes its Python import the clone, whatever is sent. The
snapshot's directories are searched before it; an install that no directory answers is named. The
server runs with the Python of the ranks, so its own search path is theirs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.common import files
from orchestrator.node.job.run_directory import home
from orchestrator.node.transfer.code import snapshot
from orchestrator.node.transfer.code.store import Store
from orchestrator.protocol.spec import Spec

PACKAGES = ("site-packages", "dist-packages")


class Installs(NamedTuple):
    """The packages that this Python imports from one directory of the node."""

    first: list[str]  # directories below it that a snapshot has
    strange: list[str]  # installs that only their own finder understands


def installs_from(directory: str) -> Installs:
    """Find what is installed from a directory, by the search path and the finders of setuptools."""
    source = os.path.realpath(os.path.expanduser(directory))
    first, strange = dict[str, None](), list[str]()
    if not os.path.isdir(source):
        return Installs([], [])
    for path in map(os.path.realpath, filter(None, sys.path)):
        if is_below(path, source) and not is_of_python(path, source):
            first[os.path.relpath(path, source)] = None
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = getattr(module, "MAPPING", None)
        if not isinstance(mapping, dict):
            if f"{source}/" in repr(getattr(finder, "__dict__", "")):
                strange.append(type(finder).__name__)
            continue
        for name, path in mapping.items():
            place = os.path.realpath(path)
            if is_below(place, source):
                stem, end = place.removesuffix(".py"), "/" + str(name).replace(".", "/")
                if stem.endswith(end):
                    first[os.path.relpath(stem.removesuffix(end), source)] = None
                else:
                    strange.append(str(name))
    return Installs(list(first), strange)


def is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(os.path.join(directory, ""))


def is_of_python(path: str, source: str) -> bool:
    """Return True for the environment itself, if it lies in the directory, and for our library."""
    prefix = os.path.realpath(sys.prefix)
    of_prefix = is_below(prefix, source) and is_below(path, prefix)
    return of_prefix or is_below(path, os.path.realpath(home())) or path.endswith(PACKAGES)


def note(path: bytes, first: list[str]) -> None:
    """Write into a snapshot which of its directories its ranks search first."""
    if first:
        files.replace(os.fsdecode(os.path.join(path, snapshot.FIRST)), "\n".join(first))


def with_first(spec: Spec) -> Spec:
    """Return a part whose ranks import from the snapshot what is installed from the copy."""
    whole = snapshot.snapshot_of(Store(), spec.workdir)
    places = list(first_of(whole, spec.workdir)) if whole else []
    before = spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    if not places or before.startswith(places[0]):  # a later attempt has it
        return spec
    path = os.pathsep.join(filter(None, (*places, before)))
    return spec.replace(env={**spec.env, "PYTHONPATH": path})


def first_of(path: bytes, workdir: str) -> Iterator[str]:
    try:
        with files.open_plain(os.fsdecode(os.path.join(path, snapshot.FIRST))) as file:
            for line in file.read().decode().splitlines():
                yield os.path.normpath(os.path.join(workdir, line))
    except FileNotFoundError:
        return
