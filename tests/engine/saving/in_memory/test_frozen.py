"""Frozen weights are copied, and sent, once for as long as they are to the bit what they were."""

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

from orchestrator.engine.saving.exchange import Mail
from orchestrator.engine.saving.in_memory import memory as memory_module
from orchestrator.engine.saving.in_memory import memory_file
from orchestrator.engine.saving.in_memory.memory import Memory
from tests.engine import pair
from tests.gears import examples

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


def begin(where: Path, shard: int = 0) -> tuple[Memory, Tensors | None]:
    """As a process does: it looks first."""
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    memory = Memory(where, "t", shard, {"model": "m"}, "alone", lambda text: None)
    found = memory.find()
    return memory, found.tensors_here() if found is not None else None


def save(memory: Memory, step: int, state: Tensors, frozen: tuple[str, ...] = FROZEN) -> None:
    memory.save(step, state, "rest", frozen)
    memory.wait()
    assert not memory.off


def same(one: Tensors | None, other: Tensors) -> bool:
    return one is not None and one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )  # fmt: skip


def copied(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Note the sizes of the tensors that each state copies."""
    noted: list[set[int]] = []
    copied_out = memory_module.copied_out

    def note(tensors: list[Tensor], targets: list[Tensor], early: int) -> None:
        noted.append({tensor.numel() for tensor in tensors})
        copied_out(tensors, targets, early)

    monkeypatch.setattr(memory_module, "copied_out", note)
    return noted


def test_each_file_is_given_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, state = copied(monkeypatch), tensors()
    for _ in range(2):  # another attempt does not believe what is there
        memory, _ = begin(tmp_path)
        for step in range(1, 6):
            state["head"] += 1
            save(memory, step, state)
            assert same(begin(tmp_path)[1], state)
    everything, head = {6000, 448, 33, 15}, {15}
    assert noted == [everything, everything, head, head, head] * 2


def test_what_changes_all_the_same_is_saved_as_it_is(tmp_path: Path) -> None:
    """Past torch's version counter, too; and the state before it is as it was."""
    state = tensors()
    memory, _ = begin(tmp_path)
    for step in range(1, 4):
        save(memory, step, state)
    before = {name: value.clone() for name, value in state.items()}
    state["body"].data[299, 19] += 1
    save(memory, 4, state)
    assert same(begin(tmp_path)[1], state)
    for path in tmp_path.glob("t.0.[01]"):
        if memory_file.describe(path)[1].step == 4:
            path.unlink()
    assert same(begin(tmp_path)[1], before)


def test_a_flipped_bit_among_them_is_found(tmp_path: Path) -> None:
    state = tensors()
    memory, _ = begin(tmp_path)
    for step in range(1, 4):
        state["head"].fill_(step)
        save(memory, step, state)
    state["head"].fill_(2)
    for path in tmp_path.glob("t.0.[01]"):
        if memory_file.describe(path)[1].step == 3:
            flip(path)
    assert same(begin(tmp_path)[1], state), "the state before it is whole"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[memory_file.BLOCK_BYTES + 5] ^= 1
    path.write_bytes(content)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    return begin(where / f"node{rank}", shard=rank)


def train(rank: int, memory: Memory, steps: range) -> None:
    for step in steps:
        save(memory, step, of_rank(rank, {**tensors(), "head": torch.full((5, 3), float(step))}))


def sent_once(rank: int, directory: Path) -> None:
    """To each of the two files on the other node."""
    sizes: list[int] = []
    send = Mail.send

    def note(mail: Mail, to: int, message: Tensor | bytes) -> None:
        sizes.append(len(message))
        send(mail, to, message)

    Mail.send = note  # type: ignore[method-assign]
    train(rank, attempt(rank, directory)[0], range(1, 6))
    states = sizes[1::3]  # after a head and before the notes
    assert states[0] == states[1] > 25_000
    assert states[2:5] == [64] * 3
    assert same(attempt(rank, directory)[1],
                of_rank(rank, {**tensors(), "head": torch.full((5, 3), 5.0)}))  # fmt: skip


def a_node_is_lost(rank: int, directory: Path) -> None:
    train(rank, attempt(rank, directory)[0], range(1, 4))
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(directory / "node0")
    torch.distributed.barrier()
    memory, found = attempt(rank, directory)
    assert same(found, of_rank(rank, {**tensors(), "head": torch.full((5, 3), 3.0)}))
    train(rank, memory, range(4, 6))
    assert same(attempt(rank, directory)[1],
                of_rank(rank, {**tensors(), "head": torch.full((5, 3), 5.0)}))  # fmt: skip


def damaged_at_the_neighbour(rank: int, directory: Path) -> None:
    """Another attempt sends it again; else it would be missed when the own node is lost."""
    train(rank, attempt(rank, directory)[0], range(1, 3))
    torch.distributed.barrier()
    if rank == 0:
        for path in (directory / "node1").glob("t.0.?"):
            flip(path)
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
