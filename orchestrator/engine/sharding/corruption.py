"""Find bits of the weights that changed by themselves: copies that were trained alike are equal.

Every so many steps each rank hashes its weights and the optimizer's state where they are, and a
thread compares the hashes with those of the other copies while the training goes on. Whoever holds
other bits than most of the copies is named, and its run ends: weights like these are not worth the
time that they train on. `orchestrator verify --sdc` then looks for the device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import JobFailed
from orchestrator.common.text import Say
from orchestrator.config.schema import Config
from orchestrator.engine.ranks.agreement import hash_there
from orchestrator.engine.ranks.ranks import Ranks, device_name, gather, new_group
from orchestrator.engine.sharding.mesh import Mesh, local_tensor, ranks_by_copy

FIX = "resume: it goes on from before; `orchestrator verify --sdc` looks for the device"
Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Difference:
    """Copies of one shard that are not equal any more."""

    tensor: str  # the first that differs
    odd: tuple[int, ...]  # the ranks with other bits than most; all, without a majority
    copies: tuple[int, ...]  # the ranks that were compared


# -- what the hashes say: pure --------------------------------------------------------------------


def odd_ones(hashes: Sequence[int]) -> tuple[int, ...]:
    """Return the places whose hash is not that of more than half; all, if none is."""
    ((common, count),) = Counter(hashes).most_common(1)
    if count * 2 <= len(hashes):
        return tuple(range(len(hashes)))
    return tuple(place for place, value in enumerate(hashes) if value != common)


def differences(
    names: Sequence[str], hashes: Sequence[Sequence[int]], copies: Iterable[Sequence[int]]
) -> list[Difference]:
    """Compare the hashes of every rank, in the order of the names, within each set of copies."""
    found = []
    for ranks in copies:
        for place, name in enumerate(names):
            if odd := odd_ones([hashes[rank][place] for rank in ranks]):
                found.append(Difference(name, tuple(ranks[one] for one in odd), tuple(ranks)))
                break
    return found


def in_words(found: Difference, ranks: Ranks, equal: int, step: int) -> str:
    """Name the copy that differs; of two copies either may be wrong."""
    odd = " and ".join(named(rank, ranks) for rank in found.odd[:4])
    odd += " and more" if len(found.odd) > 4 else ""
    when = f"after step {step}; after step {equal} all were equal"
    if found.odd == found.copies:
        which = "two" if len(found.odd) == 2 else "these"
        return (
            f"silent corruption: {odd} hold different bits in {found.tensor} {when}; of {which}"
            " copies nobody can say which one is right"
        )
    holds = "holds" if len(found.odd) == 1 else "hold"
    return (
        f"silent corruption: {odd} {holds} other bits in {found.tensor} than the other"
        f" {len(found.copies) - len(found.odd)} copies {when}"
    )


def named(rank: int, ranks: Ranks) -> str:
    node, host = ranks.nodes[rank]
    return f"rank {rank} (node {node}, {host})"


# -- the comparison -------------------------------------------------------------------------------


class Comparison:
    """One per training. Every rank calls start() after the same steps, and poll() after each."""

    def __init__(
        self,
        ranks: Ranks,
        copies: list[list[int]],
        every: int,
        step: int,
        distrust: Callable[[int], None],
        timeout: float,
    ) -> None:
        self.ranks, self.copies, self.every, self.distrust = ranks, copies, every, distrust
        self.equal = step  # the last step after which all copies were equal; a resume reads so
        self.started = step
        self.group = new_group("corruption", dist.group.WORLD, timeout)
        self.thread: threading.Thread | None = None
        self.problem = ""  # why it compares no longer, to be said once
        self.over = False
        self.found: list[Difference] = []
        self.found_at = step

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def start(self, step: int, tensors: Named) -> None:
        """Hash what this rank holds now; the rest happens while the training goes on."""
        self._join()
        if step == self.started or self.found or self.problem or self.over:
            return
        self.started = step
        names, numbers = [], []
        for name, value in tensors:
            names.append(name)
            numbers.append(hash_there(local_tensor(value)))
        device = self.ranks.device
        hashes = torch.stack([number.to(device, non_blocking=True) for number in numbers])
        ready = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if ready is not None:
            ready.record()  # the thread waits for it, not this one
        self.thread = threading.Thread(
            target=self._compare, args=(step, names, hashes, ready), daemon=True
        )
        self.thread.start()

    def poll(self, say: Say) -> None:
        """End this rank if its own bits are odd: it has to be the first to fail, and says why.

        The others miss it in their next collective, and end because of it.
        """
        if self.problem:
            say(f"WARNING: the copies of the weights are not compared any more: {self.problem}")
            self.problem, self.over = "", True
        odd = next((one for one in self.found if self.ranks.rank in one.odd), None)
        if odd is not None:
            raise JobFailed(in_words(odd, self.ranks, self.equal, self.found_at), FIX)

    def finish(self, say: Say) -> None:
        """Wait for the last comparison: no rank leaves with weights that are not equal."""
        self._join()
        self.poll(say)
        if self.found:
            culprits = ", ".join(str(odd) for one in self.found for odd in one.odd)
            raise JobFailed(f"ended because of another rank's silent corruption: rank {culprits}")

    def _join(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _compare(
        self, step: int, names: list[str], hashes: Tensor, ready: torch.cuda.Event | None
    ) -> None:
        """Send one number first; all of them only where that one differs."""
        try:
            if ready is not None:
                ready.synchronize()
            local = hashes.cpu()
            total = hash_there(local)[None]
            totals = [torch.empty_like(total) for _ in range(self.ranks.world)]
            dist.all_gather(totals, total, group=self.group)
            values = [int(value) for value in totals]
            if all(len({values[rank] for rank in some}) == 1 for some in self.copies):
                self.equal = step
                return
            everyone = gather(local.tolist(), self.group)
            found = differences(names, everyone, self.copies)
            try:
                self.distrust(self.equal)
                gather(None, self.group)  # no rank ends before suspects are set aside
            finally:
                self.found_at, self.found = step, found
        except Exception as error:  # noqa: BLE001 (another rank is gone, which is told elsewhere)
            self.problem = (str(error).splitlines() or [type(error).__name__])[0]


def start(
    config: Config,
    ranks: Ranks,
    mesh: Mesh,
    step: int,
    distrust: Callable[[int], None],
    say: Say,
) -> Comparison | None:
    """Make the comparison that the config asks for, if there is something to compare."""
    every = config.distributed.compare_copies
    if every is None:
        return None
    if mesh.copies < 2:
        say("WARNING: distributed.compare_copies has nothing to compare: there is one copy")
        return None
    rows = ranks_by_copy(mesh) if mesh.mesh is not None else [[rank] for rank in range(ranks.world)]
    copies = [list(column) for column in zip(*rows, strict=True)]
    kinds = gather((device_name(ranks.device), torch.backends.cpu.get_cpu_capability()))
    for some in copies:
        if len({kinds[rank] for rank in some}) > 1:
            say(
                "WARNING: the copies of the weights are not compared: they are on different kinds"
                f" of devices, which round differently ({kinds[some[0]][0]}, ...)"
            )
            return None
    return Comparison(ranks, copies, every, step, distrust, config.distributed.timeout)
