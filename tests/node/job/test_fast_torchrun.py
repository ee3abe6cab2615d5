import socket
import threading
import time

import pytest

from orchestrator.node.job.ranks import fast_torchrun


def test_wait_for_returns_once_master_listens() -> None:
    with socket.socket() as master:
        master.bind(("127.0.0.1", 0))  # bound, and refusing
        later = threading.Timer(0.3, master.listen)
        later.start()
        began = time.monotonic()
        fast_torchrun.wait_for("127.0.0.1", master.getsockname()[1])
        assert 0.25 < time.monotonic() - began < fast_torchrun.MASTER_SECONDS
        later.join()


def test_wait_for_gives_up_without_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_torchrun, "MASTER_SECONDS", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        fast_torchrun.wait_for("127.0.0.1", deaf.getsockname()[1])
