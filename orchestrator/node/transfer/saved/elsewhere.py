"""Tells which places the ranks of a job wrote to, beside those that come home from this node.

The ranks have noted them (node/job/ranks/written_paths.py). What is there no more was temporary,
and what is on a server's disk is no matter of this node.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.node.job.ranks.written_paths import KNOWN, NEW, encloses_all, is_in
from orchestrator.node.job.run_directory import RunDir, home
from orchestrator.node.machine.disks import mount
from orchestrator.node.transfer.code import snapshot
from orchestrator.node.transfer.code.store import Store
from orchestrator.node.transfer.saved.listing import began
from orchestrator.protocol.requests.transfer import WrittenPlace

# File systems of servers, which all nodes see alike: what is there stays, as it does by hand.
OF_SERVERS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|ceph|beegfs|glusterfs|afs|9p|virtiofs|wekafs|panfs|pvfs2"
    r"|orangefs|ocfs2|gfs2|fuse\.(s3fs|sshfs|juicefs|gcsfuse|goofys|glusterfs|ceph.*|mountpoint-s3"
    r"|rclone|blobfuse2?|geesefs)"
)
MOST_PLACES = 50
MOST_INODE = (1 << 62) - 1
MOST_FILES = 5_000  # that are counted in a place
FEW = 3  # files of one directory that are named one by one
EARLIER_SECONDS = 2.0  # that a file system's clock may be behind


@dataclass
class Noted:
    """Holds what ranks have noted: directories, and files by the directory that they are in."""

    new: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    files: dict[str, set[str]] = field(default_factory=dict)


def written(run: RunDir, until: float) -> tuple[WrittenPlace, ...]:
    """List the places of this node that were written to and do not come home."""
    spec, ours = run.read_spec(), os.path.realpath(home())
    since = began(run, spec) - EARLIER_SECONDS
    noted = noted_of(run)
    if spec.target.kind == "program" and not is_in(spec.workdir, home()):
        noted.known |= {*near(spec.workdir, since)}
    links = dict(links_of(spec.workdir)) if is_in(spec.workdir, home()) else {}
    mounts = ""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", errors="replace") as file:
        mounts = file.read()
    found = []
    for path in chosen(noted, spec.workdir):
        if is_in(path, ours) or OF_SERVERS.fullmatch(mount(mounts, path)[1]):
            continue
        place = looked_at(path, since, until, whole=path not in noted.known)
        if place is not None:
            through = next((name for name, leads in links.items() if is_in(path, leads)), "")
            inside = is_in(path, os.path.realpath(spec.workdir))
            found.append(place.replace(through=through, of_workdir=inside))
    return tuple(found[:MOST_PLACES])


def near(workdir: str, since: float) -> Iterator[str]:
    """Yield what is in a directory of the user's, and what is new beside it.

    A program that is no Python notes nothing, and writes there most of all.
    """
    above = os.path.dirname(os.path.realpath(workdir))
    for place in (workdir, *([] if encloses_all(above) else [above])):
        with contextlib.suppress(OSError):
            for entry in os.scandir(os.path.realpath(place)):
                is_new = entry.stat(follow_symlinks=False).st_mtime >= since
                hidden = entry.name.startswith(".") or entry.is_symlink()
                itself = is_in(os.path.realpath(workdir), entry.path)
                if not (hidden or itself) and (is_new or place == workdir):
                    yield entry.path


def links_of(workdir: str) -> Iterator[tuple[str, str]]:
    """Yield the links of a snapshot that lead out of it, to what the node has of its own."""
    for directory in (workdir, *map(os.fsdecode, snapshot.above(Store(), os.fsencode(workdir)))):
        with contextlib.suppress(OSError):
            for entry in os.scandir(directory):
                if entry.is_symlink():
                    yield os.path.relpath(entry.path, workdir), os.path.realpath(entry.path)


def noted_of(run: RunDir) -> Noted:
    noted = Noted()
    for notes in glob.glob(os.path.join(glob.escape(run.path), "written_*")):
        with open(notes, encoding="ascii", errors="replace") as file:
            for line in file:
                try:
                    kind, path = json.loads(line)
                except ValueError:  # a line that was cut short
                    continue
                if not isinstance(path, str) or not path.startswith("/"):
                    continue
                if kind in (NEW, KNOWN):
                    (noted.new if kind == NEW else noted.known).add(path)
                else:
                    noted.files.setdefault(os.path.dirname(path), set()).add(path)
    noted.known -= noted.new
    return noted


def chosen(noted: Noted, workdir: str) -> Iterator[str]:
    """Yield the outermost places: directories, and files of which there are few in one."""
    places = noted.new | noted.known
    for directory, paths in noted.files.items():
        there = {path for path in paths if os.path.lexists(path)}
        if len(there) > FEW and not encloses_all(directory, workdir):
            noted.known.add(directory)
            places.add(directory)
        else:
            places |= there
    for path in sorted(places):
        above = os.path.dirname(path)
        while above != "/" and above not in places:
            above = os.path.dirname(above)
        if above == "/":
            yield path


def looked_at(path: str, since: float, until: float, *, whole: bool) -> WrittenPlace | None:
    """Count what is new in a place; nothing where nothing is."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    count = size = 0
    is_directory = stat.S_ISDIR(status.st_mode)
    more = False
    for seen, state in enumerate(states_in(path) if is_directory else (status,), 1):
        if seen > MOST_FILES or time.monotonic() > until:
            more = True
            break
        ours = state.st_uid == os.geteuid() and max(state.st_mtime, state.st_ctime) >= since
        if ours or whole:
            count += 1
            size += state.st_size
    if not count and not (more and whole):
        return None
    return WrittenPlace(
        path=path,
        files=count,
        size=size,
        more=more,
        inode=status.st_ino & MOST_INODE,
        changed=max(0, status.st_ctime_ns),
    )


def states_in(directory: str) -> Iterator[os.stat_result]:
    """Yield the state of each file below a directory."""
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(place, name))
