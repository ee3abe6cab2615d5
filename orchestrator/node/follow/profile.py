"""Pass a head's wish for a profile on to rank 0 of a training here, and its answers back."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TypeVar

from orchestrator.common import files
from orchestrator.node.job.hang import step_times
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.events import Ended
from orchestrator.protocol.message import Message, Nonsense, decode, encode, parse
from orchestrator.protocol.requests import follow as profiling
from orchestrator.protocol.requests.follow import ProfileNews, ProfileState, ProfileWish

M = TypeVar("M", bound=Message)


def ask(run: RunDir, request: ProfileWish) -> ProfileState:
    """Leave the wish, once, and say how far it is. A training that never looks never answers."""
    if not os.path.isdir(run.path):
        raise ValueError(f"this machine knows nothing of job {run.job}")
    over = run.last(Ended) is not None
    path = os.path.join(run.path, profiling.WISH)
    waiting, news = read(run, profiling.WISH, ProfileWish), read(run, profiling.NEWS, ProfileNews)
    state = news if news is not None and news.id == request.id else None
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime > profiling.PATIENCE_SECONDS:
            waiting = None  # the head that left it has given up
    steps = step_times(run).values()
    stepped = max(0.0, time.time() - max(steps)) if steps else None
    busy = waiting is not None and waiting.id != request.id
    if news is not None and state is None:
        busy = busy or news.state in (profiling.ASKED, profiling.TRACING)
    if state is None and not (over or busy):
        if waiting is None:
            files.replace(path, json.dumps(encode(request)))
        with contextlib.suppress(OSError):  # rank 0 has just taken it
            os.utime(path)  # this head still waits
    return ProfileState(news=state, busy=busy, stepped=stepped, over=over)


def read(run: RunDir, name: str, kind: type[M]) -> M | None:
    try:
        with files.open_plain(os.path.join(run.path, name)) as file:
            return decode(kind, parse(file.read(1 << 14)), newer=True)
    except (OSError, Nonsense):
        return None
