"""Name the ranks that gather or sum other blocks of a sharded model than the rest, once they hang.

FSDP's collectives bear no names: a rank that leaves out a block meets the others in the wrong one,
and all wait for distributed.timeout. So each rank keeps the order of its last collectives. A thread
looks every few seconds whether there was a new one. Where there was none, the ranks compare their
orders through the store; two that differ at one position can never go on.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from orchestrator.common.errors import EXIT_FAILED, JobFailed

PAUSE_SECONDS = 5.0  # between two comparisons
KEPT_COLLECTIVES = 2048  # collectives: those of a few steps
NUMBERS = itertools.count()  # of the sharded models of a program: the same on all ranks


class Entry(NamedTuple):
    """One collective, and its place among all of this rank and among those that sum."""

    number: int
    sum_number: int  # -1: it is a matter of the ranks that share a copy of the parameters
    what: str


class BlockOrder:
    """The order in which this rank gathers and sums the blocks of a model.

    Gathers are a matter of the ranks that share a copy of the parameters; those of another copy may
    use other blocks in an evaluation. Sums are a matter of all ranks.
    """

    def __init__(self, copies: Sequence[Sequence[int]]) -> None:
        self.copies = copies  # the ranks that share each
        self.number = next(NUMBERS)
        self.entries: deque[Entry] = deque(maxlen=KEPT_COLLECTIVES)
        self.count = self.sums = 0
        self.step: list[str] = []  # what this step computed, and summed with what

    def _add(self, what: str, *, of_all: bool = False) -> None:
        self.entries.append(Entry(self.count, self.sums if of_all else -1, what))
        self.count += 1
        self.sums += of_all

    def gathers(self, block: str) -> None:
        self._add(f"gathers {block}")

    def summed(self, block: str, without: Sequence[int]) -> None:
        without_some = f" without its parameters {without}" if without else ""
        self.step.append(f"sums {block}{without_some}")
        self._add(self.step[-1], of_all=True)

    def computed(self, block: str) -> None:
        self.step.append(block)

    def end_forward(self) -> None:
        self._add("ends the forward")

    def end_step(self) -> int:
        """Return a number that stands for all of the step. It is so small that the sum of its
        squares is exact."""
        self._add("ends the step", of_all=True)
        number = zlib.crc32("\n".join(self.step).encode()) & 0x3FFF
        self.step.clear()
        return number


# -- comparing ------------------------------------------------------------------------------------


Published = Sequence[Entry]


def difference(
    published: Mapping[int, Published], copies: Iterable[Sequence[int]], fix: str
) -> JobFailed | None:
    """Find two ranks whose collectives differ at one position."""
    for field, groups in (("number", copies), ("sum_number", [sorted(published)])):
        did = {
            rank: {place: e.what for e in entries if (place := getattr(e, field)) >= 0}
            for rank, entries in published.items()
        }
        for group in groups:
            for first, other in itertools.pairwise(rank for rank in group if rank in did):
                mine, their = did[first], did[other]
                index = next((i for i in mine if mine[i] != their.get(i, mine[i])), None)
                if index is not None:
                    return JobFailed(
                        "the ranks use different blocks of the model, and would wait for each other"
                        f" forever: rank {first} {mine[index]} where rank {other} {their[index]}",
                        fix,
                    )
    return None


def packed(order: BlockOrder) -> str | None:
    """Write the order for the store; None if this rank went on meanwhile."""
    count = order.count
    try:
        entries = list(order.entries)
    except RuntimeError:  # an entry was added during the copy
        return None
    if order.count != count:
        return None
    return base64.b64encode(zlib.compress(json.dumps(entries).encode())).decode()


def unpacked(text: bytes) -> Published:
    return [Entry(*entry) for entry in json.loads(zlib.decompress(base64.b64decode(text)))]


# -- watching -------------------------------------------------------------------------------------


class Watch:
    """The thread that looks whether this rank stands still, and what the others say then."""

    def __init__(self, order: BlockOrder, fix: str) -> None:
        self.order, self.fix = order, fix
        base = distributed_c10d._get_default_store()
        self.store = distributed_c10d.PrefixStore(f"orchestrator/block_order/{order.number}", base)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.published = -1  # collectives, when this rank published its order
        self.compared = 0  # orders that the ranks had published, when they were last compared
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="block_order", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def end(self) -> None:
        """End the thread: one that is in the store while Python shuts down aborts the program."""
        self.over.set()
        self.thread.join(PAUSE_SECONDS)  # its store may be on a machine that has stopped

    def _run(self) -> None:
        count = -1
        # Without its store, a training that goes on is none the worse for it.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self.over.wait(PAUSE_SECONDS):
                if self.order.count == count:
                    self._compare(count)
                count = self.order.count

    def _compare(self, count: int) -> None:
        if self.published != count:
            text = packed(self.order)
            if text is None:
                return
            self.store.set(f"order/{self.rank}", text)
            self.store.add("published", 1)
            self.published = count
        if self.rank == 0:
            self._decide()
        if verdict := self.verdict():
            self._give_up(verdict)

    def verdict(self) -> str:
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else ""

    def _decide(self) -> None:
        published = self.store.add("published", 0)
        if published == self.compared:
            return
        self.compared = published
        keys = {rank: f"order/{rank}" for rank in range(self.world)}
        orders = {
            rank: unpacked(self.store.get(key))
            for rank, key in keys.items()
            if self.store.check([key])
        }
        if (verdict := difference(orders, self.order.copies, self.fix)) is not None:
            self.store.set("verdict", str(verdict))

    def _give_up(self, verdict: str) -> None:
        """End this process: its main thread waits in a collective, and nothing wakes it there."""
        sys.stdout.flush()
        sys.stderr.write(f"error: {verdict}\n")
        sys.stderr.flush()
        try:
            heard, deadline = self.store.add("heard", 1), time.monotonic() + 2 * PAUSE_SECONDS
            # The store may be rank 0's, and the others are to read the verdict before it is gone.
            while self.rank == 0 and heard < self.world and time.monotonic() < deadline:
                time.sleep(PAUSE_SECONDS / 10)
                heard = self.store.add("heard", 0)
        finally:
            os._exit(EXIT_FAILED)


@contextlib.contextmanager
def watched(order: BlockOrder | None, fix: str) -> Iterator[None]:
    """End with a sentence where the ranks wait for each other in different collectives."""
    if order is None:
        yield
        return
    watch = Watch(order, fix)
    watch.start()
    try:
        yield
    except RuntimeError:  # of a collective, if another rank has read the verdict first
        verdict = ""
        with contextlib.suppress(RuntimeError):
            verdict = watch.verdict()
        if verdict:
            raise JobFailed(*verdict.split("\n  ", 1)) from None
        raise
    finally:
        watch.end()
