"""Does work in a thread, one item behind: the next is unpacked while this one is written."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Behind:
    """Its work is done in order. An error is raised by the next call, and then no work is done."""

    def __init__(self, work: Callable[[bytes], None]) -> None:
        self.work = work
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def put(self, data: bytes) -> None:
        """Begin with this item, once the one before is done."""
        self.finish()
        self.thread = threading.Thread(target=self.run, args=(data,), daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait until all is done."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error

    def run(self, data: bytes) -> None:
        try:
            self.work(data)
        except Exception as error:  # noqa: BLE001  it is raised where the work was asked for
            self.error = error
