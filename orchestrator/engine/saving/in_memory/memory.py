"""Keep the newest state of all ranks in memory, beside the compute, and find it after a restart.

Each rank writes its shard below $ORCHESTRATOR_RESUME_DIR, which outlives the ranks. Of the ranks of
a node that hold the same shard, one does; a shard that only one node holds is also sent to the next
node. A state counts only if it is whole over all shards, and its files are written over only when
the one after it is. Frozen weights are written and sent once, as the constant part of the shard,
for as long as they are to the bit what they were. Ranks of another layout put their parts together
from those shards.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.permissions import others
from orchestrator.config.schema import Config
from orchestrator.engine.ranks.ranks import Ranks, gather, own_group
from orchestrator.engine.saving import pieces
from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.cost import COST, affordable, short_of
from orchestrator.engine.saving.in_memory.memory_file import (
    ConstantPart,
    Content,
    Damaged,
    Head,
    Notes,
    Place,
    Slot,
    State,
)
from orchestrator.engine.saving.in_memory.offer import OFFER_SIZE, Offer
from orchestrator.engine.saving.in_memory.shards import Entry, Whole, newest_whole, parts, source_of
from orchestrator.engine.saving.ownership import Run, attempt
from orchestrator.engine.sharding.mesh import Mesh, local_tensor

Say = Callable[[str], None]
T = TypeVar("T")
VARIABLE = "ORCHESTRATOR_RESUME_DIR"
MEASURED = 3  # states, before it is decided how often
LEAVING = 5.0  # seconds, at the end of the program


def directory() -> Path | None:
    """Return where states outlive the ranks; None where the launch gave no such place."""
    value = os.environ.get(VARIABLE)
    return Path(value) if value else None


def is_restart() -> bool:
    """Tell whether this is a further attempt of the job: what it saved on disk is its own."""
    return attempt() > 1


# -- over all ranks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The newest whole state: what is no tensor, and how this rank comes to its own tensors."""

    notes: Notes
    size: int  # of all shards that were read
    travelled: int  # ranks that took theirs from another node
    bring: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # given those that they are for
    layout: str = ""  # of the ranks that kept it, where it is another


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
        self.where, self.name, self.shard, self.say = where, name, shard, say
        self.fingerprint, self.layout, self.every = fingerprint, layout, every
        self.rank, self.world = rank_and_world()
        alone = self.world == 1
        self.group = None if alone else own_group("memory", dist.group.WORLD, timeout)
        self.off = ""  # why nothing is kept any more
        self.attempt, self.turn = "", 0
        self.step = -1  # of the state that was kept last
        self.resumed: Whole | None = None
        self.slots: dict[int, list[Slot]] = {}  # by shard; the first of each is written next
        self.constant: ConstantPart | None = None  # of the own shard
        self.before: tuple[State, bool] | None = None  # that was read, and whether it lay here
        self.named: dict[int, list[str]] = {}  # by shard: the constant parts of the last states
        self.intact: set[str] = set()  # constant parts of others that are here
        self.thread: threading.Thread | None = None
        self.copied: torch.cuda.Event | None = None
        self.needs: list[tuple[int, int]] = []  # by place: bytes of two states, of what is constant
        self.problem = ""
        self.prepared = False
        self.kept = 0  # states
        self.stalled: list[float] = []
        self.lap, self.seconds = time.perf_counter(), 0.0  # between two steps
        self.measures: list[list[float]] = []  # of each state: stall, all of it, a step
        atexit.register(self._leave)
        self._meet()

    def _meet(self) -> None:
        """Learn which ranks share memory, and what each does."""
        problem, identity = "", ""
        try:
            status = self.where.lstat()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            identity = f"{boot} {status.st_dev} {status.st_ino}"
            if not self.where.is_dir() or self.where.is_symlink():
                problem = f"{self.where} is no directory"
            elif who := others(status):
                problem = f"{self.where} {who}"
        except OSError as error:
            problem = f"{self.where}: {error.strerror}"
        met = self._everyone((problem, identity, self.shard))
        self._stop_if([problem for problem, _, _ in met])
        known = list(dict.fromkeys(identity for _, identity, _ in met))
        self.places = [known.index(identity) for _, identity, _ in met]
        self.shards = [shard for _, _, shard in met]
        self.count = len(set(self.shards))
        self.place = self.places[self.rank]
        self.first = self.places.index(self.place) == self.rank
        self.part = parts(self.places, self.shards)[self.rank]

    def _everyone(self, what: T) -> list[T]:
        return gather(what, self.group) if self.world > 1 else [what]

    def _stop_if(self, problems: Sequence[str]) -> None:
        """Keep nothing from now on if a rank cannot; all hear of it, and training goes on."""
        if self.off or not any(problems):
            return
        rank, why = next((rank, why) for rank, why in enumerate(problems) if why)
        self.off = why
        self.say(
            f"WARNING: no state is kept in memory from now on: {why} (rank {rank}); a restart goes"
            " on from the newest checkpoint on disk"
        )

    # -- finding what an earlier attempt has kept -------------------------------------------------

    def find(self) -> Found | None:
        """Read the newest state that is whole over all ranks and verifies. Every rank calls it."""
        if self.off:
            return None
        listed = self._everyone(list(self._entries()) if self.first else None)
        held = [entries for entries in listed if entries is not None]
        latest = max((entry.attempt for entries in held for entry in entries), default="")
        self.attempt = self._everyone(next_attempt(latest))[0]
        strange = next((e.difference for entries in held for e in entries if e.difference), "")
        own = [[entry for entry in entries if not entry.difference] for entries in held]
        if strange and not any(own):
            self.say(f"what is in memory is passed over: {strange}")
        while (whole := newest_whole(own)) is not None:
            alike = (whole.layout, whole.shards) == (self.layout, self.count)
            found, bad = (self._read if alike else self._look_over)(whole, own)
            if found is not None:
                self.resumed = whole
                return found
            own = [
                [e for e in own[place] if (place, e.file) not in bad] for place in range(len(own))
            ]
        if any(own):
            last = max(entry.state for entries in own for entry in entries)
            there = {entry.shard for entries in own for entry in entries
                     if (entry.layout, entry.shards) == (last.layout, last.shards)}  # fmt: skip
            lost = sorted(set(range(last.shards)) - there)
            what = (
                f"shard {lost[0]} of {last.shards} is lost" if lost else "shards of several steps"
            )
            self.say(f"what is in memory is passed over: no state is whole over all ranks ({what})")
        return None

    def _entries(self) -> Iterator[Entry]:
        """Look at the files in the memory of this node."""
        for path in sorted(self.where.iterdir()):
            named = re.fullmatch(rf"{re.escape(self.name)}\.([0-9]{{1,6}})\.[01]", path.name)
            if named is None:
                continue
            try:
                head, notes = memory_file.look(path)
                constant = None
                if notes.constant is not None:
                    file = self._constant_file(int(named[1]), notes.constant.attempt)
                    constant = file, memory_file.look(self.where / file)[0]
            except Damaged:
                continue  # it was being written when its rank ended: that is what the other is for
            yield Entry(int(named[1]), notes.attempt, notes.turn, notes.step, path.name, head,
                        notes.layout, notes.shards,
                        difference(notes.fingerprint, self.fingerprint), constant)  # fmt: skip

    def _constant_file(self, shard: int, attempt: str) -> str:
        return f"{self.name}.{shard}.{attempt}"

    def _read(
        self, whole: Whole, held: Sequence[Sequence[Entry]]
    ) -> tuple[Found | None, set[tuple[int, str]]]:
        """Bring each rank its shard, and verify it; or name the files that are damaged."""
        sources = [
            source_of(shard, place, whole, held)
            for shard, place in zip(self.shards, self.places, strict=True)
        ]
        members = self._members()
        waiting: list[tuple[Any, Any]] = []
        for rank, (place, entry) in enumerate(sources):
            server = members[place][rank % len(members[place])]
            if place != self.places[rank] and server == self.rank:
                waiting += self._send(rank, entry)
        place, entry = sources[self.rank]
        problem, state = "", None
        try:
            if place == self.place:
                contents = self._contents(entry)
            else:
                contents = self._fetch(members[place][self.rank % len(members[place])], entry)
            state = memory_file.verified(*contents)
        except Damaged as error:
            problem = str(error)
        for work, _ in waiting:
            work.wait()
        answers = self._everyone(problem)
        bad = {(sources[rank][0], sources[rank][1].file)
               for rank, problem in enumerate(answers) if problem}  # fmt: skip
        if bad:
            self._distrusted(whole, answers)
        if bad or state is None:
            return None, bad
        self.before = state, place == self.place
        sizes = self._everyone(entry.size)
        travelled = sum(there != own for (there, _), own in zip(sources, self.places, strict=True))
        own = state
        return Found(own.notes, sum(sizes), travelled, lambda _: own.tensors()), bad

    def _distrusted(self, whole: Whole, answers: Sequence[str]) -> None:
        rank, why = next((rank, why) for rank, why in enumerate(answers) if why)
        self.say(f"WARNING: in memory, the state of step {whole.step} cannot be trusted as rank"
                 f" {rank} has it: {why}; trying another")  # fmt: skip

    def _members(self) -> dict[int, list[int]]:
        """List the ranks of each place."""
        return {place: [rank for rank, other in enumerate(self.places) if other == place]
                for place in self.places}  # fmt: skip

    # -- a state that another layout has kept ---------------------------------------------------

    def _look_over(
        self, whole: Whole, held: Sequence[Sequence[Entry]]
    ) -> tuple[Found | None, set[tuple[int, str]]]:
        """Verify all shards where they are; or name the files that are damaged."""
        sources = {
            (place, shard): source_of(shard, place, whole, held)
            for place in set(self.places)
            for shard in range(whole.shards)
        }
        own = {entry.file: entry for place, entry in sources.values() if place == self.place}
        members = self._members()[self.place]
        states: dict[int, Notes] = {}
        bad: set[tuple[int, str]] = set()
        problem = ""
        for file in sorted(own)[members.index(self.rank) :: len(members)]:
            try:
                state = memory_file.verified(*self._contents(own[file]))
            except Damaged as error:
                problem = str(error)
                bad.add((self.place, file))
            else:
                states[own[file].shard] = state.notes
        answers = self._everyone((problem, bad, states))
        bad = set().union(*(files for _, files, _ in answers))
        if bad:
            self._distrusted(whole, [problem for problem, _, _ in answers])
            return None, bad
        notes = {shard: each for _, _, some in answers for shard, each in some.items()}
        sizes = {entry.shard: entry.size for _, entry in sources.values()}
        ways = [
            {sources[place, shard][0] for shard in range(whole.shards)} - {place}
            for place in self.places
        ]
        travelled = sum(map(bool, ways))
        found = Found(
            *(notes[0], sum(sizes.values()), travelled),
            functools.partial(self._put_together, sources, notes),
            whole.layout,
        )
        return found, bad

    def _put_together(
        self,
        sources: Mapping[tuple[int, int], tuple[int, Entry]],
        notes: Mapping[int, Notes],
        tensors: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Bring each rank its parts of the tensors; if one cannot have them, all hear of it."""
        members, places = self._members(), memory_file.laid_out(tensors)[0]
        near = {shard for (place, shard), (there, _) in sources.items()
                if place == self.place == there}  # fmt: skip
        kept = {shard: each.all_tensors for shard, each in notes.items()}
        wanted, problem = pieces.pieces_for(places, kept, near)
        if problem := next(filter(None, self._everyone(problem)), ""):
            raise CheckFailed(f"the state of step {notes[0].step} in {self.where} does not fit this"
                              f" model: {problem}")  # fmt: skip

        def server(shard: int, rank: int) -> int:
            there = members[sources[self.places[rank], shard][0]]
            return there[rank % len(there)] if rank not in there else rank

        @functools.cache
        def opened(shard: int) -> dict[str, tuple[Place, Tensor]]:
            entry = sources[self.place, shard][1]
            return memory_file.assembled(*self._contents(entry)).placed()

        exchange = pieces.Exchange(wanted, server, opened, self.rank, self.group)
        return exchange.bring({place.name: place for place in places})

    def _contents(self, entry: Entry) -> list[Content]:
        return [memory_file.read(self.where / file) for file, _ in entry.files]

    def _send(self, rank: int, entry: Entry) -> list[tuple[Any, Any]]:
        """Send files of this node to a rank of another one; what cannot be read, as zeros."""
        messages = []
        for file, head in entry.files:
            try:
                _, notes, payload = memory_file.read(self.where / file)
            except Damaged:
                notes, payload = bytes(head.notes), torch.zeros(head.size, dtype=torch.uint8)
            messages += [payload[: head.size], as_tensor(notes)]
        return [(dist.isend(message, rank, self.group), message) for message in messages]

    def _fetch(self, rank: int, entry: Entry) -> list[Content]:
        contents = []
        for _, head in entry.files:
            payload = torch.empty(head.size, dtype=torch.uint8)
            notes = torch.empty(head.notes, dtype=torch.uint8)
            for message in (payload, notes):
                dist.recv(message, rank, self.group)
            contents.append((head, as_bytes(notes), payload))
        return contents

    # -- keeping ------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Tell whether a state is to be kept after this step; all ranks come to the same answer."""
        now = time.perf_counter()
        self.lap, self.seconds = now, now - self.lap
        if self.off:
            return False
        if self.every is None:
            self.wait()
            if len(self.measures) < MEASURED:
                return True
            self.every = affordable(self.measures[1:])
            if self.every > 1:
                self.say(f"a state is kept in memory every {self.every} steps: more often would"
                         f" cost more than {COST:.0%} (checkpoint.memory_every)")  # fmt: skip
        return step % self.every == 0

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
        if not self.prepared:
            self._prepare({name: tensors[name] for name in frozen}, tensors)
        elif self.constant is not None and not self.off:
            self.constant.leave_changed(tensors)
        if self.off:
            return
        self.turn, self.step = self.turn + 1, step
        problem, payload = "", None
        constant = self.constant.described() if self.constant is not None else None
        places, size = memory_file.laid_out(changing(tensors, constant))
        notes = Notes(step, self.attempt, self.turn, self.fingerprint, self.layout, self.count,
                      places, rest, constant)  # fmt: skip
        if self.part.writes:
            try:
                payload = self.slots[self.shard][0].begin(size)
                self._copy(tensors, notes, payload)
            except OSError as error:
                problem = error.strerror or str(error)
        stall = time.perf_counter() - began
        self.stalled.append(stall)
        self.thread = threading.Thread(
            target=self._finish, args=(payload, notes, problem, began, stall), daemon=True
        )
        self.thread.start()

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
        """Remove the states of later steps: digests only say that files are as they were written.

        One that is being written just now goes with its file.
        """
        for path in self.where.glob(f"{self.name}.*"):
            try:
                trusted = memory_file.look(path)[1].step <= after
            except Damaged:
                trusted = False
            if not trusted:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """End, and leave the states where they are: the launch removes them with the directory."""
        self.wait()
        atexit.unregister(self._leave)  # which would hold all this for as long as the process lives
        for slot in (slot for slots in self.slots.values() for slot in slots):
            slot.close()
        if self.kept > 1:
            mean = sum(self.stalled[1:]) / len(self.stalled[1:])
            self.say(f"{self.kept} states were kept in memory; training waited {mean * 1e3:,.1f} ms"
                     " for each")  # fmt: skip

    def _leave(self) -> None:
        """Let the thread finish before the interpreter ends, but for no rank that is gone."""
        if self.thread is not None:
            self.thread.join(LEAVING)

    def _prepare(self, frozen: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Find room for two states of each shard, and its constant part; or say there is none."""
        if self.first:
            self._remove_unnamed()
        size, once, attempt = 0, 0, ""
        if self.part.writes:
            part = self.constant = self._constant_part(frozen)
            once, attempt = (part.size, part.attempt) if part is not None else (0, "")
            constant = part.described() if part is not None else None
            size = memory_file.laid_out(changing(tensors, constant))[1]
        sizes = self._everyone((size, once, attempt))
        needs, reused = [(0, 0)] * (max(self.places) + 1), set()
        for rank, own in enumerate(parts(self.places, self.shards)):
            place = self.places[rank]
            for source in (rank, *(source for _, source in own.sources)):
                size, once, attempt = sizes[source]
                needs[place] = needs[place][0] + 2 * size, needs[place][1] + once
                if attempt and place == self.place:
                    reused.add(self._constant_file(self.shards[source], attempt))
        shards = [self.shard] * self.part.writes + [shard for shard, _ in self.part.sources]
        for shard in shards:
            files = [Slot(self.where / f"{self.name}.{shard}.{index}") for index in range(2)]
            self.slots[shard] = files[::-1] if is_newer(files, self.resumed) else files
        need = sum(needs[self.place])
        lacking = short_of(self.where, need, self.name, reused) if self.first else ""
        self._stop_if(self._everyone(lacking))
        self.needs = needs
        self.prepared = True
        if not self.off:
            self._say_size()

    def _constant_part(self, frozen: Mapping[str, Tensor]) -> ConstantPart | None:
        """Go on with what an earlier attempt has written, as far as it is still so; or begin anew.

        Where that is on other nodes only, it is written again, under the same name.
        """
        before, self.before = self.before, None
        places, size = memory_file.laid_out(frozen)
        if not frozen:
            return None
        if before is not None and (kept := before[0].constant) is not None:
            same = memory_file.unchanged(kept, frozen)
            all_of_it = len(same) == len(kept.notes.tensors)
            most = 2 * sum(map(memory_file.size_of, same)) >= size
            if same and most and (before[1] or all_of_it):
                attempt = kept.notes.attempt
                path = self.where / self._constant_file(self.shard, attempt)
                part = ConstantPart(path, attempt, same, kept.payload.numel())
                if before[1]:
                    part.take(frozen)
                return part
        path = self.where / self._constant_file(self.shard, self.attempt)
        return ConstantPart(path, self.attempt, places, size)

    def _finish(
        self, payload: Tensor | None, notes: Notes, problem: str, began: float, stall: float
    ) -> None:
        """Make the state whole, on this node and the next; in a thread, with a group of its own."""
        head, packed = Head(), b""
        try:
            if payload is not None and not problem:
                if self.copied is not None:
                    self.copied.synchronize()
                packed = notes.packed()
                if self.constant is not None and self.constant.content is None:
                    self.constant.finish(notes)
                head = self.slots[self.shard][0].finish(payload, notes.turn, packed)
        except OSError as error:
            problem = error.strerror or str(error)
        try:
            problem = self._exchange(head, packed, payload) or problem
            busy = time.perf_counter() - began
            numbers = torch.tensor([float(bool(problem)), stall, busy, self.seconds])
            if self.world > 1:
                dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        except (RuntimeError, Damaged) as error:  # a rank is gone: training will end over that
            self.problem = (str(error).splitlines() or ["a rank is gone"])[0]
            return
        failed, *measures = numbers.tolist()
        if failed:
            self.problem = problem or "another rank could not keep its shard"
            return
        self.measures.append(measures)
        self.kept += 1
        for files in self.slots.values():
            files.reverse()
        if self.kept == 1 and self.first:
            self._remove_others()
        if self.part.writes:
            self._name(self.shard, notes.constant.attempt if notes.constant is not None else "")
        for shard, named in self.named.items():
            if self.kept <= 2 or len(set(named)) > 1:
                self._remove_unnamed(shard)

    def _exchange(self, head: Head, notes: bytes, payload: Tensor | None) -> str:
        """Send the own shard to the next node, and receive those of the node before.

        Constant parts come first, where the other says that it lacks them.
        """
        sent: list[tuple[Any, Tensor]] = []

        def send(messages: Sequence[Tensor], rank: int) -> None:
            sent.extend((dist.isend(each, rank, self.group), each) for each in messages)

        to, own = self.part.to, self.constant
        constant = own.content if own is not None and own.places else None
        if to is not None:
            offer = Offer(head, constant[0], own.attempt) if own and constant else Offer(head)
            send([as_tensor(offer.packed())], to)
        offered = [
            (shard, source, Offer.unpacked(as_bytes(self._received(OFFER_SIZE, source))))
            for shard, source in self.part.sources
        ]
        lacks = [self._lacks(shard, offer) for shard, _, offer in offered]
        for (_, source, _), lacking in zip(offered, lacks, strict=True):
            send([torch.tensor([lacking], dtype=torch.uint8)], source)
        if to is not None:
            if self._received(1, to).item() and constant is not None:
                send([constant[2], as_tensor(constant[1])], to)
            if head.size and payload is not None:
                send([payload, as_tensor(notes)], to)
        problem = ""
        for (shard, source, offer), lacking in zip(offered, lacks, strict=True):
            if lacking:
                file = self._constant_file(shard, offer.attempt)
                slot = Slot(self.where / file)
                problem = self._receive(slot, offer.constant, source) or problem
                slot.close()
                self.intact.add(file)
            if offer.head.size:  # else the rank that sends knows why
                problem = self._receive(self.slots[shard][0], offer.head, source) or problem
            self._name(shard, offer.attempt)
        for work, _ in sent:
            work.wait()
        return problem

    def _received(self, size: int, source: int) -> Tensor:
        message = torch.empty(size, dtype=torch.uint8)
        dist.recv(message, source, self.group)
        return message

    def _lacks(self, shard: int, offer: Offer) -> bool:
        """Tell whether a constant part is to be sent; one of an earlier attempt is verified."""
        file = self._constant_file(shard, offer.attempt)
        if not offer.attempt or file in self.intact:
            return False
        try:
            content = memory_file.read(self.where / file)
            attempt = memory_file.verified(content).notes.attempt
        except Damaged:
            return True
        own, other = content[0], offer.constant
        alike = (own.size, own.digest, attempt) == (other.size, other.digest, offer.attempt)
        if alike:
            self.intact.add(file)
        return not alike

    def _receive(self, slot: Slot, head: Head, source: int) -> str:
        """Receive a file; say why it could not be kept."""
        problem = ""
        try:
            payload = slot.begin(head.size)
        except OSError as error:
            payload, problem = torch.empty(head.size, dtype=torch.uint8), str(error)
        dist.recv(payload, source, self.group)
        notes = self._received(head.notes, source)
        if not problem:
            try:
                slot.publish(head, as_bytes(notes))
            except OSError as error:
                problem = str(error)
        return problem

    def _name(self, shard: int, attempt: str) -> None:
        """Note the constant part that a state of a shard has named."""
        self.named[shard] = [*self.named.get(shard, []), attempt][-3:]

    def _remove_unnamed(self, only: int | None = None) -> None:
        """Remove the constant parts that no state of this node names any more."""
        constant, named = [], set()
        for path in self.where.glob(f"{self.name}.*"):
            shard, _, end = path.name.removeprefix(f"{self.name}.").partition(".")
            if only is not None and shard != str(only):
                continue
            if memory_file.ATTEMPT.fullmatch(end):
                constant.append(path)
            with contextlib.suppress(Damaged):
                notes = memory_file.look(path)[1]
                if notes.constant is not None:
                    named.add(self._constant_file(int(shard), notes.constant.attempt))
        for path in constant:
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _remove_others(self) -> None:
        """Remove what ranks of an earlier layout have left here: all that counts is whole now."""
        every = zip(self.places, self.shards, parts(self.places, self.shards), strict=True)
        shards = set()
        for place, shard, part in every:
            if place == self.place:
                shards |= {shard} if part.writes else set()
                shards |= {shard for shard, _ in part.sources}
        for path in self.where.glob(f"{self.name}.*"):
            number, _, end = path.name.removeprefix(f"{self.name}.").partition(".")
            ours = end in ("0", "1") or memory_file.ATTEMPT.fullmatch(end)
            if ours and number.isdecimal() and int(number) not in shards:
                path.unlink(missing_ok=True)

    def _say_size(self) -> None:
        part = parts(self.places, self.shards)
        copied = ""
        if any(part.to is not None for part in part):
            copied = "; each node holds a copy of the one before it"
        elif len(set(self.places)) > 1:
            copied = "; each shard is on several nodes anyway, nothing is sent"
        often = f"every {self.every} steps" if self.every and self.every > 1 else "every step"
        states, once = max(self.needs, key=sum)
        constant = f" with their {text.size(once)} of frozen weights only once" if once else ""
        self.say(
            f"the state will be kept in memory {often}, in {self.where}: up to"
            f" {text.size(states + once)} on a node, for two states{constant}{copied}"
        )


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


def next_attempt(latest: str) -> str:
    """Name an attempt of the job, so that later ones sort behind; two of them never mix.

    The head's own number counts as well: nodes that are new to the job know of no attempt.
    """
    number = latest.partition("-")[0]
    following = max((int(number) if number.isdecimal() else 0) + 1, attempt())
    return f"{following:06d}-{secrets.token_hex(4)}"


def difference(found: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Say in which way a state is not this program's; nothing, if it is."""
    for key, value in own.items():
        if found.get(key) != value:
            return f"it is of another {key} ({found.get(key, 'unknown')}, here {value})"
    return ""


def is_newer(files: Sequence[Slot], resumed: Whole | None) -> bool:
    """Tell whether the first of two files holds what must not be written over next."""
    held = []
    for slot in files:
        try:
            _, notes = memory_file.look(slot.path)
            held.append((notes.attempt, notes.turn))
        except Damaged:
            held.append(("", -1))
    if resumed is not None and (own := (resumed.attempt, resumed.turn)) in held:
        return held[0] == own
    return held[0] > held[1]


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


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
