"""Gathers a report in parts, each with a time limit: one that fails or hangs says so.

The work is done in a thread. One that hangs in the kernel (a dead network file system, a broken
driver) is abandoned, and another thread does the rest; usually a single thread does it all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

Work = Callable[[], Any]


class Worker(threading.Thread):
    """Does the parts in order; `at` shows which one it is doing."""

    def __init__(self, parts: Mapping[str, Work]) -> None:
        super().__init__(daemon=True)
        self.parts = parts
        self.at = ""
        self.results: dict[str, Any] = {}
        self.problems: dict[str, str] = {}
        self.crash: BaseException | None = None

    def run(self) -> None:
        try:
            for name, work in self.parts.items():
                self.at = name
                try:
                    self.results[name] = work()
                except (OSError, ValueError) as error:
                    self.problems[name] = str(error)
        except BaseException as error:  # noqa: BLE001  a defect of ours: raised where it is waited for
            self.crash = error


def gather(seconds: float, parts: Mapping[str, Work]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (results, why the others are missing). No part takes longer than `seconds`."""
    results: dict[str, Any] = {}
    problems: dict[str, str] = {}
    rest = dict(parts)
    while rest:
        worker = Worker(rest)
        worker.start()
        worker.join(seconds)
        if worker.crash is not None:
            raise worker.crash
        late = worker.at if worker.is_alive() else ""
        results.update({name: value for name, value in worker.results.items() if name != late})
        problems.update(worker.problems)
        if not late:
            break
        problems[late] = f"it did not answer within {seconds:g} s"
        names = list(rest)
        rest = {name: rest[name] for name in names[names.index(late) + 1 :]}
    return results, problems
