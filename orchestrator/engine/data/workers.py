"""Keep the worker processes of a DataLoader alive when a signal reaches the whole process group.

torchrun, scancel, systemd and a terminal signal all processes of a rank. The rank saves and stops
after its step, and needs its workers until then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

HELD = {signal.SIGTERM, signal.SIGINT}


class Shield:
    """A worker's first function, in front of the user's own."""

    def __init__(self, user_init: Callable[[int], Any] | None = None) -> None:
        self.user_init = user_init

    def __call__(self, worker: int) -> None:
        # They are blocked since the process began; where it was forked from an older server, now.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        threading.Thread(target=obey_parent, daemon=True).start()
        if self.user_init is not None:
            self.user_init(worker)


def obey_parent() -> None:
    """End when the rank itself asks for it, as DataLoader does with a worker that it gives up."""
    parent = multiprocessing.parent_process()
    while True:
        sender = signal.sigwaitinfo(HELD).si_pid
        if parent is None or sender == parent.pid:
            os._exit(0)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Block the signals for processes that are started meanwhile: there is no moment without."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(loader: Any) -> Iterator[Any]:
    """Begin an epoch of a loader that may have workers."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    with held():
        return iter(loader)
