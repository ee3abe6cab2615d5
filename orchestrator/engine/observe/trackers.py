"""Send metrics to experiment trackers, from rank 0 only.

A tracker that is not installed, or does not know an option, is an error before training. One that
cannot be opened, fails or hangs loses its curves with a warning, and never ends the run.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.config.parse import check_one_of
from orchestrator.engine.ranks.ranks import Ranks, run_together
from orchestrator.trackers.known import (
    KNOWN,
    Curves,
    Sending,
    Tracker,
    import_tracker,
    open_tracker,
)

# The longest wait for the trackers to open.
OPEN_SECONDS = 10.0


class Trackers:
    """All requested trackers on rank 0; none on the other ranks."""

    def __init__(
        self, wanted: Sequence[str | Tracker] | Mapping[str, Any], ranks: Ranks, say: Any
    ) -> None:
        self.say, self.rank = say, ranks.rank
        self.wanted = [wanted] if isinstance(wanted, str) else wanted
        # This is None until begin().
        self.named: list[Sending] | None = None
        self.objects: list[Tracker] = []
        run_together(self._check, here=self.rank == 0)
        atexit.register(self.close)

    def begin(self, run: str, step: int) -> None:
        """Open the trackers that are given by name, once, for this run from `step` on."""
        if self.named is None:
            self.named = []
            run_together(lambda: self._open(run, step), here=self.rank == 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for sending in self.named or ():
            sending.log(values, step)
        self._do(lambda tracker: tracker.log(values, step))

    def close(self) -> None:
        named, self.named = self.named or [], []
        for sending in named:
            sending.close()
        self._do(lambda tracker: tracker.close())
        self.objects = []

    def _check(self) -> None:
        for tracker in self.wanted:
            if isinstance(tracker, str):
                check_one_of("a tracker", tracker, tuple(KNOWN))
                import_tracker(KNOWN[tracker].package, KNOWN[tracker].imports)
            elif callable(getattr(tracker, "log", None)) and callable(
                getattr(tracker, "close", None)
            ):
                self.objects.append(tracker)
            else:
                raise UsageError(
                    f"trackers: {tracker!r} has no log(values, step) and close()",
                    f"name one of {', '.join(KNOWN)}, or give an object that has both",
                )

    def _open(self, run: str, step: int) -> None:
        experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT", "")
        curves = Curves(run, Path(experiment).name, step, Path(experiment, "outputs"))
        options = self.wanted if isinstance(self.wanted, Mapping) else {}
        assert self.named is not None
        for name in (tracker for tracker in self.wanted if isinstance(tracker, str)):
            opens = partial(open_tracker, name, curves, options.get(name) or {})
            self.named.append(Sending(name, opens, self.say))
        end = time.monotonic() + OPEN_SECONDS
        for sending in self.named:
            sending.wait_open(max(0.0, end - time.monotonic()))

    def _do(self, what: Any) -> None:
        for tracker in list(self.objects):
            try:
                what(tracker)
            except Exception as error:  # noqa: BLE001
                self.objects.remove(tracker)
                name = type(tracker).__name__
                self.say(f"WARNING: {name} failed and is switched off from now on: {error}")
