"""Hear on rank 0 that a head asks for a profile of this training, and answer how far it is.

The server of this node leaves the wish in the run directory. Looking for it costs 1 us per step,
and nothing is sent: the other ranks hear of it by the vote that travels with every step anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from orchestrator.common import files
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.protocol import profiling
from orchestrator.protocol.message import Nonsense, decode, encode, parse
from orchestrator.protocol.profiling import ProfileNews, ProfileWish


class Wishes:
    """The wishes of heads, one after the other; on other ranks than the first there are none."""

    def __init__(self, ranks: Ranks) -> None:
        run = os.environ.get("ORCHESTRATOR_RUN") if ranks.rank == 0 else None
        self.run = Path(run) if run else None
        self.path = Path(run or "", profiling.WISH)
        self.wish: ProfileWish | None = None

    def look(self) -> int:
        """Take a wish, if there is a new one; return how many steps it is about, or 0."""
        if self.run is None or not self.path.exists():
            return 0
        try:
            with files.open_plain(self.path) as file:
                wish = decode(ProfileWish, parse(file.read(1 << 12)), newer=True)
            if time.time() - self.path.stat().st_mtime < profiling.PATIENCE:
                self.wish = wish
                self.tell(profiling.ASKED)  # before the wish goes, so that it is not left again
        except (OSError, Nonsense):
            wish = None
        with contextlib.suppress(OSError):
            self.path.unlink()
        if wish is None or self.wish is not wish:
            return 0
        return min(max(1, wish.steps), profiling.MOST_STEPS)

    def tell(
        self, state: str, steps: tuple[int, int] = (0, 0), directory: str = "", text: str = ""
    ) -> None:
        """Answer the wish that was taken last."""
        if self.run is None or self.wish is None:
            return
        first, last = steps
        news = ProfileNews(
            id=self.wish.id, state=state, first=first, last=last, directory=directory, text=text
        )
        with contextlib.suppress(OSError):
            files.replace(self.run / profiling.NEWS, json.dumps(encode(news)))
        if state in (profiling.WRITTEN, profiling.FAILED):
            self.wish = None
