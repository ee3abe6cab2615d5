"""A stranger at a node's SSH port causes an error in words and no output on the terminal."""

import contextlib
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.transport import Dropped
from orchestrator.head.connect.way import Way
from orchestrator.head.screen import output
from tests.head.connect.test_dial import known
from tests.head.screen.test_output import EVIL

VERSION = b"SSH-2.0-OpenSSH_9.2\r\n"
FABRIC = Way("fabric", "")


def connect(says: bytes) -> str:
    """Return how one login ends at a server that says this and hangs up."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.TemporaryDirectory() as directory,
    ):

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as client:
                client.sendall(says)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        there = known(Path(directory), *server.getsockname())
        with pytest.raises((NodeError, Dropped)) as ended:
            SshTransport(SshConfig())._log_in(there, time.monotonic() + 60, FABRIC, ())
        thread.join()
        return str(ended.value)


def packet(kind: int, payload: bytes) -> bytes:
    """One packet before there are keys: length, padding's length, payload, padding."""
    padding = 4 + -(len(payload) + 10) % 8
    body = bytes([padding, kind]) + payload + bytes(padding)
    return len(body).to_bytes(4, "big") + body


def offer(names: bytes) -> bytes:
    """A KEXINIT whose ten lists of names are all this one."""
    return packet(20, bytes(16) + (len(names).to_bytes(4, "big") + names) * 10 + bytes(5))


NAMES = [b"", b"\xff\xfe", b"none", b"curve25519-sha256,ssh-ed25519,aes128-ctr,hmac-sha2-256,none"]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    st.binary(max_size=80)
    | st.text().map(lambda text: b"SSH-2.0-" + text.encode() + b"\r\n")
    | st.lists(st.binary(max_size=20), max_size=5).map(b"\r\n".join)
    | st.binary(max_size=60).map(lambda data: VERSION + data)
    | st.tuples(st.integers(0, 255), st.binary(max_size=40)).map(lambda p: VERSION + packet(*p))
    | st.sampled_from(NAMES).map(lambda names: VERSION + offer(names))
)
@example(b"")
@example(b"SSH-1.5-old\r\n")
@example(b"\x1b]52;c;ZXZpbA==\x07\r\n" * 200)
@example(f"SSH-2.0-{EVIL}\r\n".encode())
@example(VERSION + offer(NAMES[-1]) + packet(31, b"\xff" * 40))
def test_any_answer_is_explained(says: bytes) -> None:
    words = connect(says)
    assert words and all(c.isprintable() or c in "\n\t" for c in output.printable_text(words))


def test_sshd_without_common_algorithm_is_named() -> None:
    assert "no common algorithm" in connect(VERSION + offer(b"none"))
