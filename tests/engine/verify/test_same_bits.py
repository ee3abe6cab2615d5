"""The same computation gives the same bits, and a device that does not is seen."""

from __future__ import annotations

import itertools

import torch

from orchestrator.engine.verify import same_bits

CPU = torch.device("cpu")


def test_a_sound_device_repeats_itself() -> None:
    seen, rounds = same_bits.measure(CPU, 0.0)
    assert rounds == same_bits.LEAST
    assert [len(values) for values in seen.values()] == [1] * 7
    assert len({values[0] for values in seen.values()}) == 7
    assert same_bits.measure(CPU, 0.0)[0] == seen
    assert "torch" in same_bits.kind_of(CPU)


def test_one_bit_in_one_round_is_seen() -> None:
    turn = itertools.count()

    def flips() -> torch.Tensor:
        result = torch.ones(64)
        result.view(torch.int32)[5] ^= next(turn) == 1
        return result

    seen, _ = same_bits.measure(CPU, 0.0, {"product": flips, "sum": lambda: torch.ones(3)})
    assert [len(seen["product"]), len(seen["sum"])] == [2, 1]
