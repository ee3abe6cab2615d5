"""Lists and reads files for the head: what a job's ranks wrote on this node, or any directory."""

from __future__ import annotations

import os
import stat

from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.messages import OutputFile, OutputFiles, OutputSum, SumOutput

CHUNK = 1 << 19
MOST = 1_000_000  # files in one listing
MOST_LEFT_OUT = 100
PUBLISHED = "checkpoints/step_"  # torch's .metadata belongs to it


def directory(run: RunDir) -> str:
    """Return the node's own outputs; a job on a shared disk has none (see Session.start)."""
    return os.path.join(run.path, "experiment", "outputs")


def has_checkpoints(run: RunDir) -> bool:
    path = os.path.join(directory(run), "checkpoints")
    return os.path.isdir(path) and bool(os.listdir(path))


def of_job(run: RunDir, *, checkpoints: bool) -> OutputFiles:
    """List what the ranks wrote; checkpoints belong to the node, unless they are asked for."""
    root = directory(run)
    listing = Listing(root, hidden=False)
    listing.walk("", () if checkpoints else ("checkpoints",))
    return listing.answer(checkpoints=has_checkpoints(run))


def of_path(path: str, base: str) -> OutputFiles:
    """List a file, or a directory and all that is in it, by names that begin with its own.

    A link that was named is followed.
    """
    home = os.path.expanduser("~")
    base = os.path.expanduser(base)
    whole = os.path.join(base if os.path.isdir(base) else home, os.path.expanduser(path))
    root, name = os.path.split(os.path.normpath(whole))
    listing = Listing(root, hidden=True)
    try:
        status = os.stat(whole)
        if stat.S_ISDIR(status.st_mode):
            os.listdir(whole)  # one that cannot be read is an error, and not an empty one
    except OSError as error:
        raise ValueError(f"{whole}: {(error.strerror or str(error)).lower()}") from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ValueError(f"{whole} is neither a file nor a directory")
    listing.add(name, status)
    return listing.answer()


class Listing:
    """What there is below a directory; links are not followed."""

    def __init__(self, root: str, *, hidden: bool) -> None:
        self.root, self.hidden = root, hidden
        self.files: list[OutputFile] = []
        self.left_out: list[str] = []

    def answer(self, *, checkpoints: bool = False) -> OutputFiles:
        more = len(self.left_out) - MOST_LEFT_OUT
        left_out = self.left_out[:MOST_LEFT_OUT] + ([f"and {more} more"] if more > 0 else [])
        return OutputFiles(
            files=tuple(self.files),
            place=self.root,
            checkpoints=checkpoints,
            left_out=tuple(left_out),
        )

    def walk(self, below: str, without: tuple[str, ...]) -> None:
        """Add all that is in a directory, by name."""
        try:
            entries = sorted(os.scandir(os.path.join(self.root, below)), key=lambda e: e.name)
        except OSError as error:
            if below:
                self.left_out.append(f"{below} ({error.strerror})")
            return
        for entry in entries:
            hidden = entry.name.startswith(".") and not below.startswith(PUBLISHED)
            if entry.name in without or (hidden and not self.hidden):
                continue
            path = os.path.join(below, entry.name)
            try:
                self.add(path, entry.stat(follow_symlinks=False))
            except OSError as error:
                self.left_out.append(f"{path} ({error.strerror})")

    def add(self, path: str, status: os.stat_result) -> None:
        mode, changed = stat.S_IMODE(status.st_mode), max(0.0, status.st_mtime)
        if stat.S_ISREG(status.st_mode):
            file = OutputFile(path=path, size=status.st_size, mode=mode, changed=changed)
        elif stat.S_ISDIR(status.st_mode):
            file = OutputFile(path=path, kind="directory", mode=mode)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(os.path.join(self.root, path))
            file = OutputFile(path=path, kind="link", target=target)
        else:
            self.left_out.append(f"{path} (neither a file nor a directory)")
            return
        self.files.append(file)
        if len(self.files) > MOST:
            raise ValueError(f"{self.root} holds more than {MOST} files: name a part of it")
        if file.kind == "directory":
            self.walk(path, ())


def opened(place: str, path: str) -> int:
    """Open one of the listed files. The caller has seen that it is listed."""
    return os.open(os.path.join(place, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def piece(place: str, path: str, offset: int) -> bytes:
    """Return some bytes of a file."""
    fd = opened(place, path)
    try:
        return os.pread(fd, CHUNK, offset)
    finally:
        os.close(fd)


def digest(request: SumOutput) -> OutputSum:
    """Hash a part of a file, as far as it is there."""
    import hashlib  # not for the probe

    fd = opened(request.place, request.path)
    try:
        total, at, end = hashlib.sha256(), request.offset, request.offset + request.size
        while at < end:
            data = os.pread(fd, min(CHUNK, end - at), at)
            if not data:
                break
            total.update(data)
            at += len(data)
    finally:
        os.close(fd)
    return OutputSum(sum=total.hexdigest(), size=at - request.offset)
