"""Runs first on a node: unpacks the rest of our program, once per version, and hands over to it.

Arrives on standard input and is executed as it is, so it stands alone. Must parse on any Python 3,
to be able to say that it is too old.
"""

import json
import os
import sys
import zlib


def install(digest, size, nonce):
    """Read `size` bytes of {name: source} from standard input and run the server from them."""
    blob = b""
    while len(blob) < size:
        blob += os.read(0, size - len(blob)) or sys.exit(9)
    if sys.version_info < (3, 9):
        refuse(nonce, "its Python %s is too old: 3.9 is needed" % sys.version.split()[0])
    home = os.environ.get("ORCHESTRATOR_HOME") or os.path.expanduser("~/.orchestrator")
    library = os.path.join(home, "lib", digest)
    try:
        if not os.path.isdir(library):
            unpack(json.loads(zlib.decompress(blob)), library)
        if os.stat(library).st_uid != os.getuid():
            refuse(nonce, "its %s belongs to another user" % library)
        os.utime(library)  # those that nobody used for a while are pruned
    except OSError as error:
        refuse(nonce, "its %s cannot be written: %s" % (home, error.strerror))
    sys.path.insert(0, library)
    from orchestrator.node.server.server import main

    main(nonce)


def unpack(files, library):
    """Unpack under another name first: a library is whole or not there."""
    new = "%s.%d" % (library, os.getpid())
    for name, text in files.items():
        path = os.path.join(new, name)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    try:
        os.rename(new, library)
    except OSError:
        if not os.path.isdir(library):  # else somebody else was faster
            raise


def refuse(nonce, reason):
    """Send the reason in place of the server's greeting, and exit."""
    os.write(1, ("\n%s\n!%s\n" % (nonce, reason)).encode())
    sys.exit(1)
