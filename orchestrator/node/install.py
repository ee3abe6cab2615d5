"""Runs first on a node: requests the rest of the program once per version, and starts it.

Arrives on standard input after the text of common/permissions.py and is executed as it is, so it
imports nothing else of this package.
"""

import binascii
import contextlib
import errno
import json
import os
import stat
import sys
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from orchestrator.common.permissions import loose_levels, other_writers


def install(digest, checksum, nonce):
    """Run the server from the library of this digest, which is requested if it is missing."""
    # Files of a job are private; its ranks get the login's umask back.
    umask = os.umask(0o077)
    home = os.environ.get("ORCHESTRATOR_HOME") or os.path.expanduser("~/.orchestrator")
    home = os.path.abspath(home)
    library = os.path.join(home, "lib", digest)
    try:
        os.makedirs(home, exist_ok=True)
        for path, problem in loose_levels(
            home, os.path.join(home, "lib"), os.path.join(home, "runs")
        ):
            what = "its %s %s, who could replace the programs that run there as you" % (
                path,
                problem,
            )
            refuse(nonce, "%s: chmod go-w %s there, or set ORCHESTRATOR_HOME" % (what, path))
        os.makedirs(os.path.join(home, "lib"), exist_ok=True)
        fresh = not is_sound(library, checksum)
        if fresh:
            provide(ask(nonce), checksum, library)
        # The disk may be read-only by now, and jobs may still run on it.
        with contextlib.suppress(OSError):
            # Libraries that were unused for a while are pruned, by this time.
            os.utime(library)
    except OSError as error:
        what = "its %s cannot be written: %s" % (home, error.strerror)
        what += " (see `df -h` and `df -i` there)" if error.errno == errno.ENOSPC else ""
        refuse(nonce, what + "; ORCHESTRATOR_HOME, set in its .bashrc, names another place")
    sys.path.insert(0, library)
    from orchestrator.node.server.server import main

    main(nonce, umask, fresh=fresh)


def ask(nonce):
    """Return {name: source}, packed, from standard input: a line with its size comes first."""
    os.write(1, ("\n%s\n+" % nonce).encode())
    size = b""
    while not size.endswith(b"\n"):
        size += os.read(0, 1) or sys.exit(9)
    packed = b""
    while len(packed) < int(size):
        packed += os.read(0, int(size) - len(packed)) or sys.exit(9)
    return packed


def provide(packed, checksum, library):
    """Unpack the library. An existing one is damaged, or another server has just unpacked it."""
    # This import takes 4 ms and is seldom needed.
    import shutil

    new, damaged = hidden(library), hidden(library)
    try:
        unpack(json.loads(zlib.decompress(packed).decode("ascii")), new)
        try:
            os.rename(new, library)
        except OSError:
            # A sound library was unpacked by another server.
            if not is_sound(library, checksum):
                os.rename(library, damaged)
                os.rename(new, library)
    finally:
        for left in (new, damaged):
            shutil.rmtree(left, ignore_errors=True)


def hidden(library):
    """Return a name that prune recognises as a removal that was interrupted."""
    directory, name = os.path.split(library)
    token = binascii.hexlify(os.urandom(4)).decode()
    return os.path.join(directory, ".%s.gone-%s" % (name, token))


def is_sound(library, checksum):
    """Return True if all files are complete and no other user may write them.

    A power failure leaves empty files. Reading all files takes 1 ms; syncing them to the
    disk before the rename took 1.5 s, and would not detect later damage.
    """
    total = 0
    try:
        for directory, names, files in os.walk(library):
            names[:] = [name for name in names if name != "__pycache__"]
            for path in [library] + [os.path.join(directory, name) for name in names]:
                status = os.lstat(path)
                if not stat.S_ISDIR(status.st_mode) or other_writers(status):
                    return False
            below = directory[len(library) + 1 :] + "/" if directory != library else ""
            for name in files:
                data = content(os.path.join(directory, name))
                if data is None:
                    return False
                total += zlib.crc32(data, zlib.crc32((below + name).encode("utf-8")))
    except OSError:
        return False
    return total == checksum


def content(path):
    """Return a file's bytes, or None if others may write it; open() would take 20 us longer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if other_writers(status):
            return None
        data = os.read(descriptor, status.st_size)
        return data if len(data) == status.st_size else None
    finally:
        os.close(descriptor)


def unpack(files, new):
    for name, text in files.items():
        path = os.path.join(new, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(text.encode("utf-8"))


def refuse(nonce, reason):
    """Send the reason in place of the server's greeting, and exit."""
    os.write(1, ("\n%s\n!%s\n" % (nonce, reason)).encode())
    sys.exit(1)
