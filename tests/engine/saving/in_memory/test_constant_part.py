"""Frozen weights are in memory once, for as long as they are to the bit what they were."""

from __future__ import annotations

import gc
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.memory import Memory
from tests.engine import pair

FROZEN = ("body", "table", "codes")
Tensors = dict[str, Tensor]


def tensors() -> Tensors:
    own = torch.Generator().manual_seed(0)
    return {
        "body": torch.randn(300, 20, generator=own),
        "table": torch.randn(64, 7, generator=own).t(),
        "codes": torch.arange(33, dtype=torch.int8),
        "head": torch.randn(5, 3, generator=own),
    }


def opened(where: Path, shard: int = 0, say: object = None) -> Memory:
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Memory(where, "t", shard, {"model": "m"}, "alone", lambda text: None)


def begin(where: Path) -> tuple[Memory, Tensors | None]:
    """As a process does: it looks first."""
    memory = opened(where)
    found = memory.find()
    return memory, None if found is None else {n: t.clone() for n, t in found.bring({}).items()}


def save(memory: Memory, step: int, state: Tensors, frozen: tuple[str, ...] = FROZEN) -> None:
    memory.save(step, state, "rest", frozen)
    memory.wait()
    assert not memory.off


def constants(where: Path) -> list[Path]:
    return sorted(path for path in where.glob("t.*.*") if not path.name.endswith((".0", ".1")))


def identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def same(one: Tensors | None, other: Tensors) -> bool:
    return one is not None and one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )  # fmt: skip


def test_it_is_written_once_and_found_again(tmp_path: Path) -> None:
    state = tensors()
    memory, _ = begin(tmp_path)
    save(memory, 1, state)
    (file,) = constants(tmp_path)
    first = identity(file)
    for step in (2, 3):
        state["head"] += 1
        save(memory, step, state)
    sizes = [path.stat().st_size for path in tmp_path.glob("t.0.[01]")]
    assert max(sizes) < 2 * memory_file.BLOCK < file.stat().st_size, "states hold the head alone"
    again, found = begin(tmp_path)
    assert same(found, state)
    save(again, 4, state)
    assert constants(tmp_path) == [file]
    assert identity(file) == first, "another attempt goes on with it"


def test_what_changes_all_the_same_is_saved_as_it_is(tmp_path: Path) -> None:
    """Past torch's version counter, too; and the state before it is as it was."""
    state = tensors()
    memory, _ = begin(tmp_path)
    save(memory, 1, state)
    before = {name: value.clone() for name, value in state.items()}
    state["body"].data[299, 19] += 1
    save(memory, 2, state)
    assert same(begin(tmp_path)[1], state)
    for path in tmp_path.glob("t.0.[01]"):
        if memory_file.describe(path)[1].step == 2:
            path.unlink()
    assert same(begin(tmp_path)[1], before)


def test_a_part_of_which_nothing_is_left_goes(tmp_path: Path) -> None:
    state = tensors()
    memory, _ = begin(tmp_path)
    for step in range(4):
        for name in FROZEN:
            state[name] += bool(step)
        save(memory, step, state)
        assert bool(constants(tmp_path)) == (step < 2), "the state before still names it"
        assert same(begin(tmp_path)[1], state)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[memory_file.BLOCK + 5] ^= 1
    path.write_bytes(content)


def of_another(path: Path) -> None:
    """The same bytes, which say that they are of another attempt."""
    head, notes, payload = memory_file.read(path)
    own = notes.replace(path.name.split(".")[-1].encode(), b"000009-00000000")
    path.unlink()
    slot = memory_file.Slot(path)
    slot.begin(head.size).copy_(payload)
    slot.finish(payload, head.turn, own)


@pytest.mark.parametrize("harm", [Path.unlink, flipped, of_another])
def test_a_state_without_its_constant_part_is_not_whole(tmp_path: Path, harm: object) -> None:
    assert callable(harm)
    state = tensors()
    memory, _ = begin(tmp_path)
    save(memory, 1, state)
    save(memory, 2, state)
    harm(constants(tmp_path)[0])
    memory, found = begin(tmp_path)
    assert found is None
    state["body"] += 1
    save(memory, 1, state)
    assert same(begin(tmp_path)[1], state)


def test_what_another_attempt_finds_changed_is_not_taken_from_it(tmp_path: Path) -> None:
    """One tensor: it goes into each state. Most of it: it is written anew, and the old one goes
    when no state names it any more."""
    state = tensors()
    save(begin(tmp_path)[0], 1, state)
    old = constants(tmp_path)
    state["codes"] += 1
    save(begin(tmp_path)[0], 2, state)
    assert constants(tmp_path) == old
    assert same(begin(tmp_path)[1], state)
    state["body"] = torch.zeros(300, 20)
    memory, _ = begin(tmp_path)
    for step in (3, 4):
        save(memory, step, state)
        assert same(begin(tmp_path)[1], state)
    assert len(constants(tmp_path)) == 1
    assert constants(tmp_path) != old


def test_what_was_begun_and_not_finished_goes(tmp_path: Path) -> None:
    """An attempt was killed while it wrote; the next one does not count it as its own."""
    memory_file.Slot(tmp_path / "t.0.000001-0123abcd").begin(1 << 20)
    save(begin(tmp_path)[0], 1, tensors())
    assert [path.stat().st_size < 1 << 19 for path in constants(tmp_path)] == [True]


def test_shards_of_another_layout_go_with_their_constant_parts(tmp_path: Path) -> None:
    save(begin(tmp_path)[0], 1, tensors())
    for path in [*tmp_path.glob("t.0.*")]:
        shutil.copy(path, tmp_path / path.name.replace("t.0", "t.7"))
    save(begin(tmp_path)[0], 2, tensors())
    assert not [*tmp_path.glob("t.7.*")]


def test_what_the_memory_is_told_beforehand_counts_it_once(tmp_path: Path) -> None:
    said: list[str] = []
    state = {"body": torch.zeros(1_000_000), "head": torch.zeros(1000)}
    memory = Memory(tmp_path, "t", 0, {}, "alone", said.append)
    tmp_path.chmod(0o700)
    memory.find()
    save(memory, 1, state, ("body",))
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert used < 4_100_000
    assert "up to 4.01 MB on a node, for two states with their 4 MB of frozen weights" in said[-1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(["train", "restart", *FROZEN]), max_size=8), st.randoms())
def test_whatever_happens_the_last_state_is_found(
    tmp_path_factory: pytest.TempPathFactory, moves: list[str], chance: random.Random
) -> None:
    where = tmp_path_factory.mktemp("memory")
    state = tensors()
    memory, _ = begin(where)
    for step, move in enumerate(moves):
        if move == "restart":
            memory.close()
            memory, _ = begin(where)
        else:
            value = state["head" if move == "train" else move]
            value[tuple(chance.randrange(length) for length in value.shape)] += 1
        save(memory, step, state, tuple(name for name in FROZEN if chance.random() < 0.8))
        again, found = begin(where)
        assert same(found, state)
        again.close()
    assert len(constants(where)) <= 2
    memory.close()


def test_one_that_is_closed_holds_no_file(tmp_path: Path) -> None:
    """A program may train many models, one after the other."""
    for _ in range(2):  # the second goes on with what the first has written
        memory, _ = begin(tmp_path)
        save(memory, 1, tensors())
        save(memory, 2, tensors())
        memory.close()
        del memory
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    held = [*mapped, *map(os.path.realpath, Path("/proc/self/fd").iterdir())]
    assert not [file for file in held if str(tmp_path) in file]


# -- two nodes ------------------------------------------------------------------------------------


def of_rank(rank: int, state: Tensors) -> Tensors:
    return {name: value + (rank if name != "codes" else 0) for name, value in state.items()}


def attempt(rank: int, where: Path) -> tuple[Memory, Tensors | None]:
    memory = opened(where / f"node{rank}", shard=rank)
    found = memory.find()
    return memory, None if found is None else {n: t.clone() for n, t in found.bring({}).items()}


def train(rank: int, memory: Memory, steps: range) -> None:
    for step in steps:
        save(memory, step, of_rank(rank, {**tensors(), "head": torch.full((5, 3), float(step))}))


def sent_once(rank: int, directory: Path) -> None:
    other = directory / f"node{1 - rank}"
    memory, _ = attempt(rank, directory)
    train(rank, memory, range(1, 2))
    (copy,) = [path for path in constants(other) if path.name.startswith(f"t.{rank}.")]
    first = identity(copy)
    train(rank, memory, range(2, 5))
    assert identity(copy) == first, "it is sent once"
    memory, found = attempt(rank, directory)
    assert same(found, of_rank(rank, {**tensors(), "head": torch.full((5, 3), 4.0)}))
    train(rank, memory, range(5, 7))
    assert identity(copy) == first, "another attempt finds it there"


def a_node_is_lost(rank: int, directory: Path) -> None:
    train(rank, attempt(rank, directory)[0], range(1, 4))
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(directory / "node0")
    torch.distributed.barrier()
    kept = [identity(path) for path in constants(directory / "node1")]
    torch.distributed.barrier()
    memory, found = attempt(rank, directory)
    assert same(found, of_rank(rank, {**tensors(), "head": torch.full((5, 3), 3.0)}))
    train(rank, memory, range(4, 6))
    torch.distributed.barrier()
    assert [identity(path) for path in constants(directory / "node1")] == kept
    names = [[path.name for path in constants(directory / f"node{node}")] for node in (0, 1)]
    assert names[0] == names[1], "the new node has it under the same name"
    assert same(attempt(rank, directory)[1],
                of_rank(rank, {**tensors(), "head": torch.full((5, 3), 5.0)}))  # fmt: skip


def damaged_at_the_neighbour(rank: int, directory: Path) -> None:
    """Another attempt sends it again; else it would be missed when the own node is lost."""
    train(rank, attempt(rank, directory)[0], range(1, 3))
    torch.distributed.barrier()
    if rank == 0:
        for path in constants(directory / "node1"):
            if path.name.startswith("t.0."):
                flipped(path)
    torch.distributed.barrier()
    train(rank, attempt(rank, directory)[0], range(3, 5))
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(directory / "node0")
    torch.distributed.barrier()
    assert same(attempt(rank, directory)[1],
                of_rank(rank, {**tensors(), "head": torch.full((5, 3), 4.0)}))  # fmt: skip


def ranks_hold_other_tensors(rank: int, directory: Path) -> None:
    """As the ranks of a script may; one of the nodes is lost."""
    state = {
        f"of {rank}": torch.arange(5.0 + 90 * rank),
        "all": torch.full((2, 1 + rank), 1.0 + rank),
    }
    save(attempt(rank, directory)[0], 1, state, ())
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(directory / "node0")
    torch.distributed.barrier()
    assert same(attempt(rank, directory)[1], state)


TWO_NODES = [sent_once, a_node_is_lost, damaged_at_the_neighbour, ranks_hold_other_tensors]


@pytest.mark.parametrize("function", TWO_NODES)
def test_two_nodes(tmp_path: Path, function: object) -> None:
    assert callable(function)
    pair.run(function, tmp_path)
