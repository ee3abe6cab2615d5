"""A shard in memory is whole, or it is nothing: torn, flipped, cut, foreign."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engine.ranks import ranks
from orchestrator.engine.saving.in_memory import cost, memory_file
from orchestrator.engine.saving.in_memory.memory_file import Damaged, Head, Notes, Slot, verified
from orchestrator.engine.saving.in_memory.search import next_attempt
from orchestrator.engine.saving.in_memory.shards import (
    Entry,
    Part,
    Whole,
    newest_whole,
    parts,
    source_of,
)
from orchestrator.engine.saving.pieces import Place

TENSORS = {
    "weight": torch.arange(12.0).reshape(3, 4).t(),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False]),
    "none": torch.empty(0, 3),
    "count": torch.tensor(7),
}


def write(slot: Slot, step: int, *, finish: bool = True) -> None:
    places, size = memory_file.laid_out(TENSORS)
    payload = slot.begin(size)
    for place, value in zip(places, TENSORS.values(), strict=True):
        memory_file.tensor_at(place, payload).copy_(value + step if step > 1 else value)
    if finish:
        notes = Notes(step, "000001-a", step, {"model": "m"}, "alone", 1, places, f"rest {step}")
        slot.finish(payload, step, notes.packed())


def tensors(path: Path) -> dict[str, torch.Tensor]:
    state = verified(path)
    return {own.name: memory_file.tensor_at(own, state.payload) for own in state.notes.tensors}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "a")
    write(slot, 1)
    state = verified(slot.path)
    assert (state.notes.step, state.notes.rest) == (1, "rest 1")
    for name, value in tensors(slot.path).items():
        assert torch.equal(value, TENSORS[name])
        assert (value.dtype, value.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
    assert slot.path.stat().st_mode & 0o777 == 0o600
    write(slot, 3)
    assert torch.equal(tensors(slot.path)["count"], torch.tensor(10))


def test_a_rank_that_ends_while_it_writes_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """Its file held a whole state before, whose bytes are partly there; the other one counts."""
    old, new = Slot(tmp_path / "t.0.0"), Slot(tmp_path / "t.0.1")
    write(old, 1)
    write(new, 2)
    write(old, 3, finish=False)
    with pytest.raises(Damaged, match="not written to its end"):
        memory_file.describe(old.path)
    with pytest.raises(Damaged, match="not written to its end"):
        verified(old.path)
    assert verified(new.path).notes.step == 2


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "a")
    write(slot, 1)
    content = slot.path.read_bytes()
    size = memory_file.laid_out(TENSORS)[1]
    counts = [*range(memory_file.HEAD_SIZE), *range(memory_file.BLOCK_BYTES, len(content))]
    assert len(content) > memory_file.BLOCK_BYTES + size
    for place in counts:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        slot.path.write_bytes(flipped)
        with pytest.raises(Damaged):
            verified(slot.path)
    for length in (0, 3, memory_file.BLOCK_BYTES, memory_file.BLOCK_BYTES + size, len(content) - 1):
        slot.path.write_bytes(content[:length])
        with pytest.raises(Damaged):
            verified(slot.path)


def test_what_is_no_file_of_ours_is_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("theirs")
    os.link(tmp_path / "theirs", tmp_path / "second")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "second", "pipe"):
        with pytest.raises(OSError):
            Slot(tmp_path / name).begin(64)
    for name in ("link", "theirs", "pipe", "missing"):
        with pytest.raises(Damaged):
            verified(tmp_path / name)
    assert (tmp_path / "theirs").read_bytes() == b"precious"


@pytest.mark.parametrize("shards", [0, -1, 10**9])
def test_a_state_of_no_shards_is_none(shards: int) -> None:
    """It would be whole wherever it is."""
    with pytest.raises(Damaged, match="shards"):
        Notes.unpacked(Notes(1, "000001-a", 1, {}, "alone", shards, (), "").packed())


@given(st.binary(max_size=200))
def test_notes_that_make_no_sense_are_damage(data: bytes) -> None:
    with pytest.raises(Damaged):
        Notes.unpacked(data)


@pytest.mark.parametrize(
    "place",
    [
        Place((0,), (20,), "x", "torch.float32", (20,), 0),
        Place((0,), (1,), "x", "torch.float32", (1,), -64),
        Place((0, 0), (-1, -4), "x", "torch.float32", (4, 4), 0),
        Place((0,), (1,), "x", "torch.nonsense", (1,)),
        Place((0,), (1,), "x", "torch.float32", (1,), 2),
    ],
)
def test_a_tensor_outside_of_the_file_is_damage(place: Place) -> None:
    with pytest.raises(Damaged):
        memory_file.tensor_at(place, torch.zeros(64, dtype=torch.uint8))


# -- who keeps what -------------------------------------------------------------------------------

LAYOUTS = {
    "alone": ([0], [0], [Part(writes=True)]),
    "one node": ([0, 0], [0, 1], [Part(writes=True), Part(writes=True)]),
    "full_shard on two nodes": (
        [0, 0, 1, 1],
        [0, 1, 2, 3],
        [
            Part(True, 2, ((2, 2),)),
            Part(True, 3, ((3, 3),)),
            Part(True, 0, ((0, 0),)),
            Part(True, 1, ((1, 1),)),
        ],
    ),
    "hybrid_shard: nothing is sent": ([0, 0, 1, 1], [0, 1, 0, 1], [Part(writes=True)] * 4),
    "ddp: one rank of each node writes": (
        [0, 0, 1, 1],
        [0, 0, 0, 0],
        [Part(writes=True), Part(writes=False)] * 2,
    ),
    "uneven nodes": (
        [0, 0, 1],
        [0, 1, 2],
        [Part(True, 2, ((2, 2),)), Part(True, 2), Part(True, 0, ((0, 0), (1, 1)))],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_work_is_divided(name: str) -> None:
    places, shards, expected = LAYOUTS[name]
    assert parts(places, shards) == expected


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=24))
def test_any_node_may_be_lost(ranks: list[tuple[int, int]]) -> None:
    """Where there is more than one, each shard is in the memory of two, once in each."""
    places, shards = [place for place, _ in ranks], [shard for _, shard in ranks]
    kept = list(zip(places, shards, parts(places, shards), strict=True))
    held = [(place, shard) for place, shard, part in kept if part.writes]
    held += [(place, shard) for place, _, part in kept for shard, _ in part.sources]
    assert len(held) == len(set(held))
    for shard in set(shards):
        assert sum(own == shard for _, own in held) >= min(2, len(set(places)))
    for rank, (_, _, part) in enumerate(kept):
        for shard, source in part.sources:
            assert kept[source][2].to == rank
            assert shards[source] == shard


def entry(shard: int, turn: int, attempt: str = "000001-a", shards: int = 2) -> Entry:
    layout = f"full_shard in {shards} shards"
    return Entry(shard, Whole(attempt, turn, turn, layout, shards), f"t.{shard}.{turn % 2}", Head())


def whole(turn: int, attempt: str = "000001-a") -> Whole:
    return entry(0, turn, attempt).state


def test_only_what_is_whole_counts_and_steps_never_mix() -> None:
    held = [[entry(0, 6), entry(0, 7)], [entry(1, 6), entry(1, 5)]]
    assert newest_whole(held) == whole(6)
    assert newest_whole([held[0], []]) is None
    assert newest_whole([[entry(0, 7)], [entry(1, 6)]]) is None
    again = [[entry(0, 7)], [entry(1, 7, "000002-b")]]  # one step, of two attempts
    assert newest_whole(again) is None
    later = [[*held[0], entry(0, 3, "000002-b")], [*held[1], entry(1, 3, "000002-b")]]
    assert newest_whole(later) == whole(3, "000002-b")
    for order in itertools.permutations(later[0]):
        assert newest_whole([order, later[1]]) == whole(3, "000002-b")


def test_how_many_shards_a_state_has_it_says_itself() -> None:
    """An attempt on fewer nodes has others: what it has not all kept yet does not hide the rest."""
    old = [[entry(shard, 6, shards=3)] for shard in range(3)]
    new = [entry(0, 1, "000002-b"), entry(1, 1, "000002-b")]
    assert newest_whole(old) == entry(0, 6, shards=3).state
    assert newest_whole([*old, new[:1]]) == entry(0, 6, shards=3).state
    assert newest_whole([*old[:2], new]) == whole(1, "000002-b")


def test_a_rank_takes_its_shard_from_its_own_node_if_it_is_there() -> None:
    held = [[entry(0, 7), entry(1, 7)], [entry(1, 7)], []]
    assert source_of(1, 1, whole(7), held)[0] == 1
    assert source_of(1, 2, whole(7), held)[0] == 0
    assert source_of(0, 1, whole(7), held)[0] == 0


def test_attempts_sort_as_they_come() -> None:
    latest = ""
    for _ in range(12):
        assert next_attempt(latest) > latest
        latest = next_attempt(latest)
    assert latest.startswith("000012-")


@pytest.mark.parametrize(
    ("measures", "every"),
    [
        ([(0.001, 0.1, 0.5)], 1),
        ([(0.1, 0.2, 0.6)], 7),  # 0.1 s of 7 steps of 0.5 s are less than 3%
        ([(0.001, 1.2, 0.5)], 3),  # it has to be done before the next one
        ([(0.9, 0.9, 0.1), (0.001, 0.1, 0.5)], 1),
    ],
)
def test_how_often_is_what_it_costs(measures: list[tuple[float, float, float]], every: int) -> None:
    assert cost.affordable(measures) == every


def test_memory_that_is_short_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cost.short_of(tmp_path, 1 << 20, "t") == ""
    assert "two states of this node's ranks take 1126 TB" in cost.short_of(tmp_path, 1 << 50, "t")
    monkeypatch.setattr(ranks, "MEMINFO", tmp_path / "meminfo")
    ranks.MEMINFO.write_text("MemTotal: 100 kB\nMemAvailable:     1000 kB\n")
    assert cost.short_of(tmp_path, 900_000, "t") == ""
    assert "1.02 MB are available on" in cost.short_of(tmp_path, 1_000_000, "t")
    Slot(tmp_path / "t.0.0").begin(500_000)  # what an earlier attempt has there is used again
    assert cost.short_of(tmp_path, 1_000_000, "t") == ""
