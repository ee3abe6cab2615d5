"""A process does not end while a thread of gloo still needs the interpreter."""

import ctypes
import hashlib
import threading

import pytest

from orchestrator.engine.ranks import ranks

PR_SET_NAME = 15


def test_finish_waits_for_thread_outside_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The call takes long on a busy machine.
    monkeypatch.setattr(ranks, "LIMIT_SECONDS", 600.0)
    named, dropped, over = (threading.Event() for _ in range(3))

    def run_collective() -> None:
        """Compute without the interpreter, as gloo does, then need it for a moment."""
        ctypes.CDLL(None).prctl(PR_SET_NAME, ranks.NAME.encode())
        named.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)
        dropped.set()
        over.wait()

    thread = threading.Thread(target=run_collective)
    thread.start()
    named.wait()
    ranks.finish_threads()
    try:
        assert dropped.is_set()
    finally:
        over.set()
        thread.join()
