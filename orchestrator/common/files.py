"""Files that are replaced whole, and directories that go whole, on the head and on the nodes.

Shipped to the nodes: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, Union

Name = Union[str, "os.PathLike[str]"]

READ_BYTES = 1 << 20
# The mode of the files that belong to this program.
PRIVATE = 0o600
# The mode, before the umask, of files that the user asked for.
AS_USUAL = 0o666

# A directory that is being deleted is named .NAME.gone-0123abcd.
GONE = ".gone-"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOUNTS = "/proc/self/mountinfo"
# Other machines cannot write to these, although they have no device of their own. The writable part
# of an overlay belongs to one mount, also where it lies on a disk that others see.
OF_ONE_MACHINE = {b"tmpfs", b"ramfs", b"overlay", b"btrfs", b"zfs", b"bcachefs"}
# Some network file systems have no such call.
NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
# Locks of an open file, not of a process (fcntl(2)): processes that inherit the file hold them.
F_OFD_SETLK = 37
# struct flock: type, whence, start, length, pid.
FLOCK = struct.Struct("hhqqi4x")

NO_INODES = "`df -i` shows whether inodes are what is missing"

# The temporary files that this process is writing.
_unfinished: set[str] = set()


def reason_of_error(error: OSError) -> str:
    """Return the reason of a system error; a disk without free inodes counts as full."""
    words = error.strerror or str(error)
    return f"{words} ({NO_INODES})" if error.errno == errno.ENOSPC else words


# -- files ------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_replacement(
    path: Name, mode: int = PRIVATE, *, exactly: bool = False
) -> Iterator[BinaryIO]:
    """Fill a new file; at the end of the block it takes the place of `path`, safe on the disk.

    A reader of `path` finds the old or the new content, never a part, even after a crash. The file
    is private by default; the umask limits another mode, unless `exactly` is set.
    """
    directory, name = os.path.split(os.fspath(path))
    new = os.path.join(directory, f".{name}.{os.urandom(4).hex()}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    _unfinished.add(new)
    try:
        with path_in_errors(path), open(os.open(new, flags, mode), "wb") as file:
            if exactly or mode == PRIVATE:
                # The path may name another file by now, so the descriptor is used.
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    finally:
        _unfinished.discard(new)


def remove_unfinished() -> None:
    """Remove the files that open_replacement() is filling, for a process that ends before that."""
    for new in list(_unfinished):
        with contextlib.suppress(OSError):
            os.unlink(new)


@contextlib.contextmanager
def path_in_errors(path: Name) -> Iterator[None]:
    """Add the path to an OSError without one, as a write to a full disk raises it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def replace_file(
    path: Name, content: str | bytes, mode: int = PRIVATE, *, exactly: bool = False
) -> None:
    """Write a whole file, text as UTF-8: see open_replacement()."""
    with open_replacement(path, mode, exactly=exactly) as file:
        file.write(
            content.encode(errors="backslashreplace") if isinstance(content, str) else content
        )


def open_plain(path: Name, dir_fd: int | None = None) -> BinaryIO:
    """Open a plain file for reading; a link, a directory, a pipe and a device are refused."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EPERM, "not a plain file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        # open() does not close the descriptor if it fails.
        os.close(descriptor)
        raise


def read_plain(path: Name, dir_fd: int | None = None, largest: int = -1) -> bytes:
    """Return the content of a plain file, its first bytes where it is larger: see `open_plain`."""
    with open_plain(path, dir_fd) as file:
        return file.read(largest)


def file_digest(descriptor: int) -> str:
    """Return the SHA-256 of a file."""
    # The import takes 5 ms, and a probe does not need it.
    import hashlib

    total, offset = hashlib.sha256(), 0
    while data := os.pread(descriptor, READ_BYTES, offset):
        total.update(data)
        offset += len(data)
    return total.hexdigest()


def state_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return a tuple that differs after any change of a file, even if its mtime was reset."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def open_to_append(path: Name) -> int:
    """Open a private file for appending; raise OSError for anything but a plain file.

    Its directory is no symbolic link either. A file with a second name may be anything of ours.
    """
    directory, name = os.path.split(os.fspath(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open_directory(directory) as inside:
        descriptor = os.open(name, flags, PRIVATE, dir_fd=inside)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise OSError(errno.EPERM, "not a plain file of its own", os.fspath(path))
            if not status.st_size:
                os.fchmod(descriptor, PRIVATE)
                give_to_owner_of(inside, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def append_lines(descriptor: int, lines: bytes) -> int:
    """Append lines to a file; return the number of bytes that are in it, of whole lines only.

    A disk that becomes full within a line gets nothing of that line. Copies of a growing file, and
    logs whose rest is written later (job_log, event_file, node_logs, growing), write bytes instead.
    """
    written = os.write(descriptor, lines)
    whole = lines.rfind(b"\n", 0, written) + 1
    if whole < written:
        os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_END) - (written - whole))
    return whole


def add_lines(path: Name, lines: bytes) -> int:
    """Append lines to a file that is opened for them alone, as append_lines() does."""
    descriptor = open_to_append(path)
    try:
        return append_lines(descriptor, lines)
    finally:
        os.close(descriptor)


def give_to_owner_of(directory: int, descriptor: int) -> None:
    """As root, give a new file to the owner of the directory that it is in."""
    if os.geteuid() == 0:
        status = os.fstat(directory)
        if status.st_uid != 0:
            os.fchown(descriptor, status.st_uid, status.st_gid)


def unlock_inherited(path: Name) -> None:
    """Release the locks of a file that this process inherited open, for all its holders."""
    with contextlib.suppress(OSError):
        wanted = os.stat(path)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), wanted):
                    whole = FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
                    fcntl.fcntl(descriptor, F_OFD_SETLK, whole)


# -- directories ------------------------------------------------------------------------------


def make_private(path: Name) -> None:
    """Create a directory with mode 0700, independent of the umask."""
    os.mkdir(path, 0o700)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o777 != 0o700:
        os.chmod(path, mode & 0o7000 | 0o700)


@contextlib.contextmanager
def open_directory(path: Name, dir_fd: int | None = None) -> Iterator[int]:
    """Open a directory that is no symbolic link, and give its descriptor."""
    directory = os.open(path, DIRECTORY, dir_fd=dir_fd)
    try:
        yield directory
    finally:
        os.close(directory)


def sync_directory(path: Name, dir_fd: int | None = None) -> None:
    """Sync a directory to the disk, as its renames are durable only then."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(directory)


def hidden_name(name: str) -> str:
    """Return a hidden name under which a directory is deleted."""
    return f".{name}{GONE}{os.urandom(4).hex()}"


def hide_directory(path: Name, hidden: Name, dir_fd: int | None = None) -> None:
    """Hide a directory by one rename: it counts as deleted, even after a crash."""
    os.rename(path, hidden, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    sync_directory(os.path.dirname(os.fspath(hidden)) or ".", dir_fd)


def delete_directory(
    path: Name, seen: Callable[[int], None] = lambda _: None, dir_fd: int | None = None
) -> list[str]:
    """Delete a hidden directory; return a line for each entry that could not be deleted.

    seen() hears how many bytes went. All is done by names in directories that are held open: no
    symbolic link is followed, and no mount is crossed. Entries that
    another process deletes at the same time are no error.
    """
    problems: list[str] = []

    def note(error: OSError, name: str = "") -> None:
        if not isinstance(error, FileNotFoundError):
            where = error.filename if isinstance(error.filename, str) else os.fspath(path)
            problems.append(f"{name or where}: {error.strerror}")

    try:
        with open_directory(path, dir_fd) as top:
            here = mount_of(top)
        for where, inner, files, directory in os.fwalk(
            path, topdown=False, onerror=note, dir_fd=dir_fd
        ):
            if mount_of(directory) != here:
                problems.append(f"{where}: it is mounted there")
                continue
            for name in (*files, *inner):
                before = len(problems)
                try:
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    remove = os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink
                    remove(name, dir_fd=directory)
                    seen(status.st_blocks * 512)
                except OSError as error:
                    # An earlier problem in this directory explains that it is not empty.
                    if error.errno != errno.ENOTEMPTY or not before:
                        note(error, os.path.join(where, name))
        if not problems:
            os.rmdir(path, dir_fd=dir_fd)
    except RecursionError:
        problems.append(f"{path}: its directories are nested too deeply")
    except OSError as error:
        note(error)
    return problems


def mount_of(descriptor: int) -> bytes:
    """Return the number of the mount that an open directory is on, as the kernel writes it."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        return next((line for line in file if line.startswith(b"mnt_id:")), b"")
    return b""


def mounts_below(path: Name) -> list[str]:
    """Return the mount points in a directory, which may be itself: their content is not ours."""
    inside = os.path.realpath(path)
    try:
        with open(MOUNTS, "rb") as file:
            fields = [line.split()[4] for line in file]
    except (OSError, IndexError):
        return []
    octal = re.compile(rb"\\([0-7]{3})")
    points = [os.fsdecode(octal.sub(lambda m: bytes([int(m[1], 8)]), field)) for field in fields]
    return [point for point in points if point == inside or point.startswith(inside + "/")]


def is_local(directory: Name) -> bool:
    """Return True for a directory on a disk of this machine, or in its memory.

    Network disks have no device, but neither have the file systems of OF_ONE_MACHINE.
    """
    if os.major(os.stat(directory).st_dev) > 0:
        return True
    with open_directory(os.path.realpath(directory)) as opened, open(MOUNTS, "rb") as mounts:
        number = mount_of(opened).split()[1:]
        return any(
            line.split()[:1] == number and line.partition(b" - ")[2].split()[0] in OF_ONE_MACHINE
            for line in mounts
        )


def our_directory() -> str:
    """Return the directory for this login's own files; ORCHESTRATOR_HOME overrides it."""
    return os.environ.get("ORCHESTRATOR_HOME") or expand_home("~/.orchestrator")


def current_umask() -> int:
    """Return the umask of this process; to set it for a moment would reach other threads."""
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    # macOS has no /proc.
    before = os.umask(0o077)
    os.umask(before)
    return before


def expand_home(path: Name) -> str:
    """Replace ~ by the home directory; the ~ of an unknown user stays as it is."""
    # pathlib's expanduser() raises for an unknown user.
    return os.path.expanduser(os.fspath(path))
