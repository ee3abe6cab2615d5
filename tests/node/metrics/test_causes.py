"""What is told of a machine: once, in the doctor's words, and not for a spike."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.node.metrics.causes import IN_A_ROW, Causes

GB = 1 << 30


def told(sample: dict[str, Any], times: int = 10) -> list[str]:
    causes = Causes(set())
    return [notice.text for _ in range(times) for notice in causes.look(sample)]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"disks": {"/": [3 * GB, 100 * GB]}}, "/: 3 GiB free of 100 GiB"),
        ({"disks": {"/": [6 * GB, 100 * GB]}}, None),
        ({"disks": {"/dev/shm": [1 << 20, 64 << 20]}}, "/dev/shm is full: 1 MiB free of 64 MiB"),
        ({"disks": {"/dev/shm": [1 * GB, 100 * GB]}}, None),
        ({"disks": {"/empty": [0, 0]}}, None),
        (
            {"gpu": {"ecc_uncorrected": [0, None, 2]}},
            "GPU 2: 2 uncorrected memory errors since its driver started",
        ),
        (
            {"gpu": {"throttle": [0x4, 0x48], "celsius": [50, 91], "mhz": [1980, None]}},
            "GPU 1 (91 C): slowed down, too hot",
        ),
        ({"gpu": {"throttle": [0x88]}}, "GPU 0: slowed down, its power supply asks for it"),
        ({"gpu": {"throttle": [0x8]}}, "GPU 0: slowed down, its hardware asks for it"),
        ({"gpu": {"throttle": [0x1, 0x4, None]}}, None),  # idle, and at its power limit
        (
            {"swap_per_s": 5 << 20, "swap_bytes": 1 * GB},
            "it swaps 5 MiB a second, 1 GiB of memory are on disk",
        ),
        ({"swap_per_s": 1000, "swap_bytes": 1 * GB}, None),
        (
            {"tcp_sent_per_s": 2000, "tcp_resent_per_s": 196},
            "its network loses packets: TCP sends 9.8% of them again",
        ),
        ({"tcp_sent_per_s": 2000, "tcp_resent_per_s": 20}, None),  # many senders, one receiver
        ({"tcp_sent_per_s": 8, "tcp_resent_per_s": 4}, None),  # somebody calls who is not there
    ],
)
def test_each_cause_is_told_once(sample: dict[str, Any], words: str | None) -> None:
    assert told(sample) == ([words] if words else [])


def test_a_spike_is_not_told() -> None:
    causes = Causes(set())
    for mask in [0x40] * (IN_A_ROW - 1) + [0] + [0x40] * (IN_A_ROW - 1):
        assert causes.look({"gpu": {"throttle": [mask]}}) == []
    assert causes.look({"gpu": {"throttle": [0x40]}})


def test_what_an_earlier_attempt_told_is_not_told_again() -> None:
    assert Causes({"shm_full"}).look({"disks": {"/dev/shm": [0, GB]}}) == []
