"""Makes snapshots for the jobs of one head, and removes those that no job uses."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from orchestrator.common import files
from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.server.session import ServerSession, SessionState
from orchestrator.node.transfer import snapshot
from orchestrator.node.transfer.store import Store
from orchestrator.protocol.requests.transfer import CheckedOut, CheckOut
from orchestrator.protocol.spec import Spec


class CodeSession(SessionState):
    """One head's work on the store, and the snapshots without a job so far."""

    def __init__(self, session: ServerSession) -> None:
        super().__init__(session)
        self.store = Store()
        self.store.prepare()
        self.unused: set[bytes] = set()

    def check_out(self, request: CheckOut) -> CheckedOut:
        """Return a new snapshot of an offered tree whose contents have all arrived."""
        from orchestrator.node.machine.disks import disk_of
        from orchestrator.node.machine.probe import resolve_target

        entries, (first, strange) = self.store.tree(request.tree), installs_from(request.beside)
        with self.store.writing():
            path, root = snapshot.make_snapshot(
                self.store, request.snapshot, request.title, entries, first
            )
            self.unused.add(path)
            linked = snapshot.link_own(path, root, request.beside, request.outputs, request.inputs)
        workdir = os.fsdecode(root)
        return CheckedOut(
            workdir=workdir,
            own=tuple(linked),
            installed=tuple(first),
            strange=tuple(strange),
            target=resolve_target(request.target, workdir),
            disk=disk_of(workdir),
        )

    def job_started(self, part: PartDir, spec: Spec) -> None:
        """Assign the snapshot to the job that runs in it."""
        path = snapshot.snapshot_of(self.store, spec.workdir)
        if path in self.unused:
            self.unused.remove(path)
            owner = os.path.join(os.fsdecode(path), os.fsdecode(snapshot.OWNER))
            files.replace_file(owner, f"{part.job}\n{part.part}\n")
            # The job does not wait for the cleanup.
            threading.Thread(target=clean_snapshots, daemon=True).start()

    def leave(self) -> None:
        """Remove snapshots without a job."""
        for path in self.unused:
            with contextlib.suppress(OSError):
                snapshot.remove_snapshot(path)


def clean_snapshots() -> int:
    """Remove snapshots whose jobs are gone, and unused contents; return the bytes freed."""
    store, now, freed = Store(), time.time(), 0
    # The store may not exist yet.
    with contextlib.suppress(OSError):
        freed += snapshot.tidy_snapshots(store, now)
        freed += store.collect(now)
    return freed


# -- packages that this Python imports from the node's own copy of the code -------------------

PACKAGES = ("site-packages", "dist-packages")


def installs_from(directory: str) -> tuple[list[str], list[str]]:
    """Return what this Python imports from a directory, by sys.path and setuptools' finders.

    The first list has directories below it that the snapshot has as well, the second the names of
    packages that only their own finder can resolve.
    """
    source = os.path.realpath(os.path.expanduser(directory))
    first, strange = dict[str, None](), list[str]()
    for name, path in installed_places(source):
        place, end = os.path.realpath(path), "/" + name.replace(".", "/") if name else ""
        if is_below(place, source) and not is_of_python(place, source):
            stem = place.removesuffix(".py")
            if stem.endswith(end):
                first[os.path.relpath(stem.removesuffix(end), source)] = None
            else:
                strange.append(name)
    return list(first), strange


def installed_places(source: str) -> Iterator[tuple[str, str]]:
    """Yield the directories of sys.path, without a name, and the modules that finders know."""
    yield from (("", path) for path in sys.path if path)
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = getattr(module, "MAPPING", None)
        if isinstance(mapping, dict):
            yield from mapping.items()
        elif f"{source}/" in repr(getattr(finder, "__dict__", "")):
            yield type(finder).__name__, source


def is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(os.path.join(directory, ""))


def is_of_python(path: str, source: str) -> bool:
    """Return True for the environment itself, if it lies in the directory, and this library."""
    prefix = os.path.realpath(sys.prefix)
    of_prefix = is_below(prefix, source) and is_below(path, prefix)
    return (
        of_prefix
        or is_below(path, os.path.realpath(files.our_directory()))
        or path.endswith(PACKAGES)
    )


def spec_with_snapshot_first(spec: Spec) -> Spec:
    """Return a spec whose ranks import packages from the snapshot instead of the node's copy."""
    whole = snapshot.snapshot_of(Store(), spec.workdir)
    if not whole:
        return spec
    with files.open_plain(os.fsdecode(os.path.join(whole, snapshot.WHOLE))) as file:
        places = file.read().decode().splitlines()
    places = [os.path.normpath(os.path.join(spec.workdir, place)) for place in places]
    before = spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    # The spec of a later attempt has the path already.
    if not places or before.startswith(places[0]):
        return spec
    path = os.pathsep.join(filter(None, (*places, before)))
    return spec.replace(env={**spec.env, "PYTHONPATH": path})
