"""Tells this node's supervisor, where there is one, what a rank has found; it tells the head."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from orchestrator.engine.ranks.ranks import Ranks

LONGEST_TEXT = 400  # the line stays under PIPE_BUF, so lines of ranks never mix


def tell(ranks: Ranks, cause: str, who: int, step: int, text: str) -> None:
    """Report what the rank `who` causes, such as that nothing is saved since this step."""
    run = os.environ.get("ORCHESTRATOR_RUN")
    if not run:
        return
    line = {
        "event": "slow",
        "rank": ranks.rank,
        "local": ranks.local,
        "time": time.time(),
        "cause": cause,
        "who": who,
        "node": ranks.nodes[who][0],
        "step": step,
        "text": text[:LONGEST_TEXT],
    }
    with contextlib.suppress(OSError):  # the supervisor is gone
        pipe = os.open(Path(run, "reports"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, json.dumps(line).encode("ascii") + b"\n")
        finally:
            os.close(pipe)
