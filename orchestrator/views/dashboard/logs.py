"""Searches the nodes' logs."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import Any

from orchestrator.common import files
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.screen.lines import clean
from orchestrator.head.screen.log_reader import LogFile, stream_at
from orchestrator.records.experiment import Experiment
from orchestrator.views.tail import LONGEST_CHARACTERS, is_plain

BLOCK_BYTES = 1 << 20
HITS = 50  # of each node: the last ones
SEARCH_SECONDS = 10.0
LONGEST_WORD = 200


def search(experiment: Experiment, word: str) -> dict[str, Any]:
    """Find a word in all nodes' logs: how often, and the last places of each node."""
    deadline = time.monotonic() + SEARCH_SECONDS
    wanted = re.compile(re.escape(word[:LONGEST_WORD].encode()), re.IGNORECASE)
    found, total, whole, unread = [], 0, True, []
    for log in log_files(experiment, experiment.read_record().nodes):
        if not is_plain(log.text):
            continue
        try:
            places, count, complete = places_in(log, wanted, deadline)
            found += [hit(log, offset, line) for offset, line in places]
        except OSError as error:
            unread.append(f"node {log.node} ({error.strerror})")
            continue
        total, whole = total + count, whole and complete
    return {
        **{"hits": found, "count": total, "whole": whole, "seconds": SEARCH_SECONDS},
        "unread": ", ".join(unread),
    }


def places_in(
    log: LogFile, wanted: re.Pattern[bytes], deadline: float
) -> tuple[deque[tuple[int, bytes]], int, bool]:
    """Return the last lines with the word and where they begin, and how many lines have it."""
    places: deque[tuple[int, bytes]] = deque(maxlen=HITS)
    count, at, rest = 0, 0, b""
    with files.open_plain(log.text) as file:
        while data := file.read(BLOCK_BYTES):
            if time.monotonic() > deadline:
                return places, count, False
            text = rest + data
            end = text.rfind(b"\n") + 1 or (len(text) if len(text) > BLOCK_BYTES else 0)
            count += search_text(text[:end], at, wanted, places)
            at, rest = at + end, text[end:]
    count += search_text(rest, at, wanted, places)
    return places, count, True


def search_text(
    text: bytes, at: int, wanted: re.Pattern[bytes], places: deque[tuple[int, bytes]]
) -> int:
    count, after = 0, 0
    while match := wanted.search(text, after):
        begin = text.rfind(b"\n", 0, match.start()) + 1
        end = text.find(b"\n", match.end())
        end = len(text) if end < 0 else end
        near = max(begin, match.start() - LONGEST_CHARACTERS // 2)
        places.append((at + begin, text[near : min(end, near + LONGEST_CHARACTERS)]))
        count, after = count + 1, end
    return count


def hit(log: LogFile, offset: int, line: bytes) -> dict[str, Any]:
    text = clean(line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2])
    return {"node": log.node, "rank": stream_at(log, offset), "line": text}
