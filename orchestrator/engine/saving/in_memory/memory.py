"""Keep the newest state of all ranks in memory, beside the compute, and find it after a restart.

Each rank writes its shard below $ORCHESTRATOR_RESUME_DIR, which outlives the ranks. Of the ranks of
a node that hold the same shard, one does; a shard that only one node holds is also sent to the next
node. A state counts only if it is whole over all shards, and its files are written over only when
the one after it is. Frozen weights are written and sent once, as the constant part of the shard,
for as long as they are to the bit what they were.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.common import text
from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say
from orchestrator.config.schema import Config
from orchestrator.engine.ranks.ranks import Ranks, gather, own_group
from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.cost import Pace, short_of
from orchestrator.engine.saving.in_memory.exchange import Mail
from orchestrator.engine.saving.in_memory.files import Files
from orchestrator.engine.saving.in_memory.memory_file import (
    ATTEMPT,
    HEAD_SIZE,
    ConstantPart,
    Damaged,
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
LONGEST_ATTEMPT = 32  # bytes of an attempt's name


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
        self.group = None if world == 1 else own_group("memory", dist.group.WORLD, timeout)
        self.off = ""  # why nothing is kept any more
        self.problem = ""  # of the state that is being kept
        self.attempt, self.turn = "", 0
        self.step = -1  # of the state that was kept last
        self.found: Found | None = None  # until the first state is kept
        self.slots: dict[int, list[Slot]] | None = None  # by shard; the first is written next
        self.constant: ConstantPart | None = None  # of the own shard
        self.named: dict[int, str] = {}  # by shard: the constant part that its last state names
        self.unsettled = 2  # states until no other constant part can be named
        self.intact: set[Path] = set()  # constant parts of others that are here
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
        return gather(what, self.group) if self.group is not None else [what]

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
        self, step: int, tensors: Mapping[str, Tensor], rest: str, frozen: Iterable[str] = ()
    ) -> None:
        """Keep a state; the one before has to be done first. Every rank calls it.

        Those that are frozen are written once, as long as nothing changes them.
        """
        if self.constant is not None and self.constant.copies.sums:
            torch.cuda.current_stream().synchronize()  # what the step still takes is not our cost
        began = time.perf_counter()
        self.wait()
        if self.slots is None:
            self._prepare(tensors, {name: tensors[name] for name in frozen})
        elif self.constant is not None and not self.off:
            self.constant.leave_changed(tensors)
        if self.off:
            return
        self.turn, self.step = self.turn + 1, step
        constant = self.constant.described() if self.constant is not None else None
        places, size = memory_file.laid_out(changing(tensors, constant))
        notes = Notes(step, self.attempt, self.turn, self.fingerprint, self.layout,
                      self.members.count, places, rest, constant)  # fmt: skip
        payload, problem = None, ""
        if self.members.part.writes:
            try:
                payload = self._slot(self.members.shard).begin(size)
                self._copy(tensors, notes, payload)
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

    def _copy(self, tensors: Mapping[str, Tensor], notes: Notes, payload: Tensor) -> None:
        """Copy what changes, and the constant part if it is not there yet."""
        places = [(place, payload) for place in notes.tensors]
        if self.constant is not None and self.constant.content is None:
            constant = self.constant.begin(tensors)
            places += [(place, constant) for place in self.constant.places.values()]
        values = [local_tensor(tensors[place.name]) for place, _ in places]
        targets = [memory_file.tensor_at(place, where) for place, where in places]
        self.copied = copied_out(values, targets)

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
        """Find room for two states of each shard, and its constant part; or say there is none."""
        members, found = self.members, self.found
        if members.first:
            self.files.remove_unnamed()
        size, once, name = 0, 0, ""
        if members.part.writes:
            part = self.constant = self._constant_part(frozen)
            constant = part.described() if part is not None else None
            size = memory_file.laid_out(changing(tensors, constant))[1]
            once, name = (part.size, part.attempt) if part is not None else (0, "")
        sizes = self._everyone((size, once, name))
        needs, reused = [(0, 0)] * (max(members.places) + 1), set()
        for rank, place in enumerate(members.places):
            sources = [rank, *(source for _, source in members.parts[rank].sources)]
            for size, once, _ in map(sizes.__getitem__, sources):
                needs[place] = needs[place][0] + 2 * size, needs[place][1] + once
            if place == members.place:
                reused |= {
                    self.files.constant(members.shards[s], sizes[s][2]).name for s in sources
                }
        resumed = found.whole if found is not None else None
        kept = members.kept_by(members.rank)
        self.slots = {shard: self.files.slots(shard, resumed) for shard in kept}
        self.found = None
        need = sum(needs[members.place])
        lacking = short_of(self.where, need, self.files.name, reused) if members.first else ""
        self._stop_if(self._everyone(lacking))
        if not self.off:
            self._say_size(*max(needs, key=sum))

    def _constant_part(self, frozen: Mapping[str, Tensor]) -> ConstantPart | None:
        """Go on with what an earlier attempt has written, as far as it is still so; or begin anew.

        Where that is on other nodes only, it is written again, under the same name.
        """
        found, shard = self.found, self.members.shard
        if not frozen:
            return None
        places, size = memory_file.laid_out(frozen)
        if found is not None and found.notes.constant is not None and found.constant:
            kept = found.notes.constant
            same = memory_file.unchanged(kept.tensors, found.constant, frozen)
            most = 2 * sum(map(memory_file.size_of, same)) >= size
            if same and most and (found.is_here or len(same) == len(kept.tensors)):
                path = self.files.constant(shard, kept.attempt)
                part = ConstantPart(path, kept.attempt, same)
                if found.is_here:
                    part.take(frozen)
                return part
        return ConstantPart(self.files.constant(shard, self.attempt), self.attempt, places)

    def _say_size(self, states: int, once: int) -> None:
        members, every, copied = self.members, self.pace.every, ""
        if any(part.to is not None for part in members.parts):
            copied = "; each node holds a copy of the one before it"
        elif len(set(members.places)) > 1:
            copied = "; each shard is on several nodes anyway, nothing is sent"
        often = f"every {every} steps" if every and every > 1 else "every step"
        constant = f" with their {text.size(once)} of frozen weights only once" if once else ""
        self.say(
            f"the state will be kept in memory {often}, in {self.where}: up to"
            f" {text.size(states + once)} on a node, for two states{constant}{copied}"
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
                packed = notes.packed()
                if self.constant is not None and self.constant.content is None:
                    self.constant.finish(notes)
                head = self._slot(self.members.shard).finish(payload, notes.turn, packed)
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
        self._let_go(notes)

    def _let_go(self, notes: Notes) -> None:
        """Let the state before be written over, and remove what is not named any more."""
        slots = self.slots or {}
        for files in slots.values():
            files.reverse()
        self.pace.kept += 1
        if self.pace.kept == 1 and self.members.first:
            self.files.remove_but(self.members.kept_here())
        if self.members.part.writes:
            self._name(self.members.shard, notes.constant.attempt if notes.constant else "")
        if self.unsettled:
            self.unsettled -= 1
            for shard in slots:
                self.files.remove_unnamed(shard)

    def _name(self, shard: int, attempt: str) -> None:
        """Note the constant part that a state names; the state before may name another one."""
        if self.named.setdefault(shard, attempt) != attempt:
            self.named[shard], self.unsettled = attempt, 2

    def _share(self, head: Head, notes: bytes, payload: Tensor | None) -> str:
        """Send the own shard to the next node, and receive those of the node before.

        Constant parts come first, where the other says that it lacks them.
        """
        mail, to, own = Mail(self.group), self.members.part.to, self.constant
        constant = own.content if own is not None and own.places else None
        if to is not None:
            mail.send(to, announced(head, own.attempt if own and constant and head.size else ""))
        coming = [
            (shard, source, *announcement(mail, source))
            for shard, source in self.members.part.sources
        ]
        lacks = [self._lacks(shard, its) for shard, _, _, its in coming]
        for (_, source, _, _), lacking in zip(coming, lacks, strict=True):
            mail.send(source, bytes([lacking]))
        if to is not None:
            if mail.receive_bytes(to, 1)[0] and constant is not None:
                mail.send(to, announced(constant[0]))
                mail.send(to, constant[2])
                mail.send(to, constant[1])
            if head.size and payload is not None:
                mail.send(to, payload)
                mail.send(to, notes)
        problem = ""
        for (shard, source, there, its), lacking in zip(coming, lacks, strict=True):
            if lacking:
                slot = Slot(self.files.constant(shard, its))
                other = announcement(mail, source)[0]
                problem = received(mail, slot, other, source) or problem
                slot.close()
                self.intact.add(slot.path)
            if there.size:  # else the rank that sends knows why
                problem = received(mail, self._slot(shard), there, source) or problem
            self._name(shard, its)
        mail.wait()
        return problem

    def _lacks(self, shard: int, attempt: str) -> bool:
        """Tell whether a constant part is to be sent; one of an earlier attempt is verified."""
        path = self.files.constant(shard, attempt)
        if not attempt or path in self.intact:
            return False
        try:
            if memory_file.verified(memory_file.read(path)).notes.attempt != attempt:
                return True
        except Damaged:
            return True
        self.intact.add(path)
        return False


def announced(head: Head, attempt: str = "") -> bytes:
    """Say what will be sent, and which attempt wrote the constant part of it."""
    return head.packed() + attempt.encode().ljust(LONGEST_ATTEMPT)


def announcement(mail: Mail, source: int) -> tuple[Head, str]:
    data = mail.receive_bytes(source, HEAD_SIZE + LONGEST_ATTEMPT)
    attempt = data[HEAD_SIZE:].decode(errors="replace").strip()
    if attempt and not ATTEMPT.fullmatch(attempt):
        raise Damaged("the constant part has no name")
    return Head.unpacked(data[:HEAD_SIZE]), attempt


def received(mail: Mail, slot: Slot, head: Head, source: int) -> str:
    """Receive a file; say why it could not be kept."""
    problem, payload = "", None
    try:
        payload = slot.begin(head.size)
    except OSError as error:
        problem = str(error)
    mail.receive(source, head.size, payload)
    notes = mail.receive_bytes(source, head.notes)
    try:
        if payload is not None:
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


def changing(
    tensors: Mapping[str, Tensor], constant: memory_file.Constant | None
) -> dict[str, Tensor]:
    """Leave out what is in the constant part."""
    there = {place.name for place in constant.tensors} if constant is not None else set()
    return {name: value for name, value in tensors.items() if name not in there}


def copied_out(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Copy to the host; from a GPU on a stream of its own, with the event that ends it."""
    gpu = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if gpu is None:
        for tensor, target in zip(tensors, targets, strict=True):
            target.copy_(tensor)
        return None
    stream = side_stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for tensor, target in zip(tensors, targets, strict=True):
            target.copy_(tensor, non_blocking=True)
        done.record(stream)
    return done


@functools.cache
def side_stream(gpu: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
