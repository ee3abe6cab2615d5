"""Keep the newest state of all ranks in memory, beside the compute, and find it after a restart.

Each rank writes its shard below $ORCHESTRATOR_RESUME_DIR, which outlives the ranks. Of the ranks of
a node that hold the same shard, one does; a shard that only one node holds is also sent to the next
node. A state counts only if it is whole over all shards, and its files are written over only when
the one after it is. Frozen weights are written into each of the two files of a shard, and sent,
once, for as long as they are to the bit what they were.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.common import text
from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say
from orchestrator.config.schema import Config
from orchestrator.engine.ranks.ranks import Ranks, new_group
from orchestrator.engine.saving.exchange import Mail, everyone
from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.cost import Pace, short_of
from orchestrator.engine.saving.in_memory.files import Files
from orchestrator.engine.saving.in_memory.memory_file import (
    HEAD_SIZE,
    Damaged,
    Fixed,
    Head,
    Notes,
    Slot,
)
from orchestrator.engine.saving.in_memory.search import Found, Search
from orchestrator.engine.saving.in_memory.shards import Members
from orchestrator.engine.saving.ownership import Run
from orchestrator.engine.sharding.mesh import Mesh, local_tensor

T = TypeVar("T")
VARIABLE = "ORCHESTRATOR_RESUME_DIR"
LEAVING_SECONDS = 5.0  # at the end of the program


def directory() -> Path | None:
    """Return where states outlive the ranks; None where the launch gave no such place."""
    value = os.environ.get(VARIABLE)
    return Path(value) if value else None


class Memory:
    """One per training. save() returns when the state is copied, or its copy is under way."""

    def __init__(
        self,
        where: Path,
        name: str,
        shard: int,
        fingerprint: Mapping[str, str],
        layout: str,
        say: Say,
        *,
        every: int | None = 1,
        timeout: float = 600.0,
    ) -> None:
        self.where, self.say, self.fingerprint, self.layout = where, say, fingerprint, layout
        self.files, self.pace = Files(where, name), Pace(every)
        rank, world = rank_and_world()
        self.group = None if world == 1 else new_group("memory", dist.group.WORLD, timeout)
        self.off = ""  # why nothing is kept any more
        self.problem = ""  # of the state that is being kept
        self.attempt, self.turn = "", 0
        self.step = -1  # of the state that was kept last
        self.found: Found | None = None  # until the first state is kept
        self.slots: dict[int, list[Slot]] | None = None  # by shard; the first is written next
        self.fixed = Fixed({})  # what does not change of the own shard
        self.thread: threading.Thread | None = None
        self.copied: torch.cuda.Event | None = None
        atexit.register(self._leave)
        self.members = self._meet(rank, shard)

    def _meet(self, rank: int, shard: int) -> Members:
        """Learn which ranks share memory."""
        met = self._everyone((*self.files.identity(), shard))
        self._stop_if([problem for _, problem, _ in met])
        known = list(dict.fromkeys(identity for identity, _, _ in met))
        places = tuple(known.index(identity) for identity, _, _ in met)
        return Members(rank, places, tuple(shard for _, _, shard in met))

    def _everyone(self, what: T) -> list[T]:
        return everyone(what, self.group)

    def _stop_if(self, problems: Sequence[str]) -> None:
        """Keep nothing from now on if a rank cannot; all hear of it, and training goes on."""
        if self.off or not any(problems):
            return
        rank, self.off = next((rank, text) for rank, text in enumerate(problems) if text)
        self.say(
            f"WARNING: no state is kept in memory from now on: {self.off} (rank {rank}); a restart"
            " goes on from the newest checkpoint on disk"
        )

    def find(self) -> Found | None:
        """Find the newest state that is whole over all ranks and verifies. Every rank calls it."""
        if self.off:
            return None
        search = Search(
            self.files, self.members, self.fingerprint, self.layout, self.group, self.say
        )
        self.attempt, self.found = search.newest()
        return self.found

    # -- keeping ------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Tell whether a state is to be kept after this step; all ranks come to the same answer."""
        self.pace.begin_step()
        if self.off:
            return False
        if self.pace.every is None:
            self.wait()
        return self.pace.due(step, self.say)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        rest: str,
        frozen: Iterable[str] = (),
        early: Collection[str] = (),
    ) -> None:
        """Keep a state; the one before has to be done first. Every rank calls it.

        Those that are frozen are written once into each file, as long as nothing changes them.
        Those that are early may change before settle() is called, so they are copied before that.
        """
        if self.fixed.copies.sums:
            torch.cuda.current_stream().synchronize()  # what the step still takes is not our cost
        began = time.perf_counter()
        self.wait()
        if self.slots is None:
            self._prepare(tensors, {name: tensors[name] for name in frozen})
        elif not self.off:
            self.fixed.leave_changed(tensors)
        if self.off:
            return
        self.turn, self.step = self.turn + 1, step
        places, size = self.fixed.laid_out(tensors)
        notes = Notes(step, self.attempt, self.turn, self.fingerprint, self.layout,
                      self.members.count, places, rest)  # fmt: skip
        payload, problem = None, ""
        if self.members.part.writes:
            try:
                payload = self._slot(self.members.shard).begin(size)
                self._copy(tensors, notes, payload, early)
            except OSError as error:
                problem = error.strerror or str(error)
        stall = time.perf_counter() - began
        self.pace.stalls.append(stall)
        self.thread = threading.Thread(
            target=self._finish, args=(payload, notes, problem, began, stall), daemon=True
        )
        self.thread.start()

    def _slot(self, shard: int) -> Slot:
        """Return the file that a state of a shard is written into."""
        assert self.slots is not None
        return self.slots[shard][0]

    def _copy(
        self,
        tensors: Mapping[str, Tensor],
        notes: Notes,
        payload: Tensor,
        early: Collection[str],
    ) -> None:
        """Copy what changes, and what does not if the file does not have it yet."""
        places = notes.tensors
        if self._slot(self.members.shard).settled:
            places = places[len(self.fixed.places) :]
        elif not self.fixed.copies.copies:
            self.fixed.note(tensors, payload)
        in_turn = sorted(places, key=lambda place: place.name not in early)
        values = [local_tensor(tensors[place.name]) for place in in_turn]
        targets = [memory_file.tensor_at(place, payload) for place in in_turn]
        self.copied = copied_out(values, targets, sum(place.name in early for place in places))

    def settle(self) -> None:
        """Let no GPU change the tensors before they are copied. Called before they change."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def wait(self) -> None:
        """Wait for the state that is being kept."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = self.copied = None
        if self.problem:
            self._stop_if([self.problem])

    def distrust(self, after: int) -> None:
        """Remove the states of later steps: a digest only says that a file is as it was written."""
        self.files.remove_after(after)

    def close(self) -> None:
        """End, and leave the states where they are: the launch removes them with the directory."""
        self.wait()
        atexit.unregister(self._leave)  # which would hold all this for as long as the process lives
        for slot in (slot for slots in (self.slots or {}).values() for slot in slots):
            slot.close()
        if summary := self.pace.summary():
            self.say(summary)

    def _leave(self) -> None:
        """Let the thread finish before the interpreter ends, but for no rank that is gone."""
        if self.thread is not None:
            self.thread.join(LEAVING_SECONDS)

    # -- before the first state -------------------------------------------------------------------

    def _prepare(self, tensors: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        """Find room for two states of each shard; or say that there is none."""
        members, size = self.members, 0
        if members.part.writes:
            self.fixed = Fixed(frozen)
            size = self.fixed.laid_out(tensors)[1]
        sizes = self._everyone(size)
        needs = [0] * (max(members.places) + 1)
        for rank, place in enumerate(members.places):
            sources = [rank, *(source for _, source in members.parts[rank].sources)]
            needs[place] += 2 * sum(sizes[source] for source in sources)
        resumed = self.found.whole if self.found is not None else None
        kept = members.kept_by(members.rank)
        self.slots = {shard: self.files.slots(shard, resumed) for shard in kept}
        self.found = None
        need = needs[members.place]
        lacking = short_of(self.where, need, self.files.name) if members.first else ""
        self._stop_if(self._everyone(lacking))
        if not self.off:
            self._say_size(max(needs))

    def _say_size(self, size: int) -> None:
        members, every, copied = self.members, self.pace.every, ""
        if any(part.to is not None for part in members.parts):
            copied = ", with a copy of the node before it"
        elif len(set(members.places)) > 1:
            copied = ", already replicated: no extra traffic"
        often = f"every {every} steps" if every and every > 1 else "every step"
        self.say(
            f"checkpoint in memory {often}: up to {text.size(size)} per node for two states, in"
            f" {self.where}{copied}"
        )

    # -- in a thread, with a group of its own -----------------------------------------------------

    def _finish(
        self, payload: Tensor | None, notes: Notes, problem: str, began: float, stall: float
    ) -> None:
        """Make the state whole, on this node and the next."""
        head, packed = Head(), b""
        try:
            if payload is not None and not problem:
                if self.copied is not None:
                    self.copied.synchronize()
                packed, slot = notes.packed(), self._slot(self.members.shard)
                head = slot.finish(payload, notes.turn, packed, self.fixed.size)
        except OSError as error:
            problem, head, packed = error.strerror or str(error), Head(), b""
        try:
            problem = self._share(head, packed, payload) or problem
            busy = time.perf_counter() - began
            numbers = torch.tensor([float(bool(problem)), stall, busy, self.pace.step_seconds])
            if self.group is not None:
                dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        except (RuntimeError, Damaged) as error:  # a rank is gone: training will end over that
            self.problem = (str(error).splitlines() or ["a rank is gone"])[0]
            return
        failed, *measures = numbers.tolist()
        if failed:
            self.problem = problem or "another rank could not keep its shard"
            return
        self.pace.measures.append(measures)
        self._let_go()

    def _let_go(self) -> None:
        """Let the state before be written over, and remove what an earlier layout has left."""
        for files in (self.slots or {}).values():
            files[0].settled = files[0].head.fixed
            files.reverse()
        self.pace.kept += 1
        if self.pace.kept == 1 and self.members.first:
            self.files.remove_but(self.members.kept_here())

    def _share(self, head: Head, notes: bytes, payload: Tensor | None) -> str:
        """Send the own shard to the next node, and receive those of the node before."""
        mail, to, problem = Mail(self.group), self.members.part.to, ""
        if to is not None:
            mail.send(to, head.packed())
            if head.size and payload is not None:
                mail.send(to, payload[self._slot(self.members.shard).settled :])
                mail.send(to, notes)
        for shard, source in self.members.part.sources:
            there = Head.unpacked(mail.receive_bytes(source, HEAD_SIZE))
            if there.size:  # else the rank that sends knows why
                problem = received(mail, self._slot(shard), there, source) or problem
        mail.wait()
        return problem


def received(mail: Mail, slot: Slot, head: Head, source: int) -> str:
    """Receive a state, or what changes of it; say why it could not be kept."""
    problem, into = "", None
    try:
        into = slot.begin(head.size)[slot.settled :]
    except OSError as error:
        problem = str(error)
    mail.receive(source, head.size - slot.settled, into)
    notes = mail.receive_bytes(source, head.notes)
    try:
        if into is not None:
            slot.publish(head, notes)
    except OSError as error:
        problem = str(error)
    return problem


# -- of a training ------------------------------------------------------------------------------


def of_training(
    model: nn.Module, mesh: Mesh, ranks: Ranks, config: Config, optimizer: str, run: Run,
    number: int, say: Say,
) -> Memory | None:  # fmt: skip
    """Open what outlives the ranks, if the launch gave a place for it and nobody refused."""
    where, every = directory(), config.checkpoint.memory_every
    if where is None or every == 0:
        if every:
            say(f"checkpoint.memory_every does nothing here: {VARIABLE} is not set, which a launch"
                " with --max-restarts does")  # fmt: skip
        return None
    shard, count = shard_of(model, mesh, ranks)
    layout = f"{mesh.strategy} in {count} shards"
    own = {"program": run.program, "model": run.model, "optimizer": optimizer}
    timeout = config.distributed.timeout
    return Memory(where, f"trainer{number}", shard, own, layout, say, every=every, timeout=timeout)


def shard_of(model: nn.Module, mesh: Mesh, ranks: Ranks) -> tuple[int, int]:
    """Return this rank's shard, and how many there are: copies of the parameters hold the same.

    Not where the model has buffers: each rank has the running statistics of its own batches.
    """
    kept = model.state_dict().keys()
    if mesh.copies == 1 or any(name in kept for name, _ in model.named_buffers()):
        return ranks.rank, ranks.world
    if mesh.mesh is None:
        return 0, 1
    return int(mesh.mesh.get_local_rank(-1)), int(mesh.mesh.size(-1))


# -- small parts --------------------------------------------------------------------------------


def rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "a state is kept in memory by all ranks together, and they have no process group yet",
            "torch.distributed.init_process_group() comes first",
        )
    return 0, 1


def copied_out(
    tensors: Sequence[Tensor], targets: Sequence[Tensor], early: int
) -> torch.cuda.Event | None:
    """Copy to the host; from a GPU on a stream of its own, with the event that ends it.

    The GPU goes on once the first ones, as many as are early, are copied.
    """
    gpu = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if gpu is None:
        for tensor, target in zip(tensors, targets, strict=True):
            target.copy_(tensor)
        return None
    training, stream = torch.cuda.current_stream(gpu), side_stream(gpu)
    stream.wait_stream(training)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for number, (tensor, target) in enumerate(zip(tensors, targets, strict=True), 1):
            target.copy_(tensor, non_blocking=True)
            if tensor.device == gpu:  # else what is made for this state alone is free too soon
                tensor.record_stream(stream)
            if number == early:
                training.wait_stream(stream)
        done.record(stream)
    return done


@functools.cache
def side_stream(gpu: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
