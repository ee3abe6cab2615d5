"""Name, list and remove the files of a training's states in the memory of one node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.common.permissions import others
from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.memory_file import Damaged, Slot
from orchestrator.engine.saving.in_memory.shards import Entry, Whole

BOOT = Path("/proc/sys/kernel/random/boot_id")
STATES = ("0", "1")  # the ends of the names of the two states of a shard


class Files:
    """NAME.SHARD.0 and .1 are two states of a shard."""

    def __init__(self, where: Path, name: str) -> None:
        self.where, self.name = where, name

    def identity(self) -> tuple[str, str]:
        """Return what shows that two ranks see the same memory; or why it cannot be used."""
        try:
            status = self.where.lstat()
            boot = BOOT.read_text(encoding="ascii").strip()
        except OSError as error:
            return "", f"{self.where}: {error.strerror}"
        problem = ""
        if not self.where.is_dir() or self.where.is_symlink():
            problem = f"{self.where} is not a directory"
        elif who := others(status):
            problem = f"{self.where} {who}"
        return f"{boot} {status.st_dev} {status.st_ino}", problem

    def slots(self, shard: int, resumed: Whole | None) -> list[Slot]:
        """Return the files of a shard, the one that is written next first: what was resumed from
        is the last to be written over, or else the newest."""
        kept = (resumed.attempt, resumed.turn) if resumed is not None else None

        def order(slot: Slot) -> tuple[bool, str, int]:
            try:
                _, notes = memory_file.describe(slot.path)
            except Damaged:
                return False, "", -1
            return (notes.attempt, notes.turn) == kept, notes.attempt, notes.turn

        slots = [Slot(self.where / f"{self.name}.{shard}.{end}") for end in STATES]
        return sorted(slots, key=order)

    def all(self) -> Iterator[tuple[Path, int]]:
        """Give each file that is ours, and its shard."""
        for path in sorted(self.where.iterdir()):
            named = re.fullmatch(rf"{re.escape(self.name)}\.([0-9]{{1,6}})\.[01]", path.name)
            if named:
                yield path, int(named[1])

    def entries(self, fingerprint: Mapping[str, str]) -> Iterator[Entry]:
        """Describe the states that are there."""
        for path, shard in self.all():
            try:
                head, notes = memory_file.describe(path)
            except Damaged:
                continue  # it was being written when its rank ended: that is what the other is for
            state = Whole(notes.attempt, notes.turn, notes.step, notes.layout, notes.shards)
            yield Entry(shard, state, path.name, head, difference(notes.fingerprint, fingerprint))

    # -- what goes --------------------------------------------------------------------------------

    def remove_but(self, shards: set[int]) -> None:
        """Remove what ranks of an earlier layout have left here."""
        for path, shard in self.all():
            if shard not in shards:
                path.unlink(missing_ok=True)

    def remove_after(self, step: int) -> None:
        """Remove the states of later steps; one that is being written goes with its file."""
        for path, _ in self.all():
            try:
                trusted = memory_file.describe(path)[1].step <= step
            except Damaged:
                trusted = False
            if not trusted:
                path.unlink(missing_ok=True)


def difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Say in which way a state is not this program's; nothing, if it is."""
    for key, value in wanted.items():
        if found.get(key) != value:
            return f"it is of another {key} ({found.get(key, 'unknown')}, here {value})"
    return ""
