"""Measured links and a config in, how long a step takes with each strategy out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.schema import Config, Fsdp, Training
from orchestrator.views.verify import prediction
from orchestrator.views.verify.prediction import Message, Times

RATE = 1e9  # bytes per second among all ranks
INSIDE = 50e9  # within a node
SIZES = [1 << power for power in range(10, 31, 2)]
GROUPS = [10_000_000, *[20_000_000] * 4]


def rows(collective: str, scope: str, rate: float) -> list[dict[str, Any]]:
    """Twenty microseconds, and what the bytes take."""
    return [
        {"collective": collective, "scope": scope, "bytes": size, "seconds": 2e-5 + size / rate}
        for size in SIZES
    ]


def told(nodes: int = 2, local: int = 8, device: str = "H200", **model: Any) -> dict[str, Any]:
    collectives = [
        row
        for name in ("all_reduce", "all_gather", "reduce_scatter")
        for row in rows(name, "all", RATE)
    ]
    if nodes > 1 and local > 1:
        for name in ("all_gather", "reduce_scatter"):
            collectives += rows(name, "node", INSIDE)
        collectives += rows("all_reduce", "across", RATE)
    return {
        "nodes": [{"ranks": list(range(n * local, (n + 1) * local))} for n in range(nodes)],
        "devices": [device] * (nodes * local),
        "collectives": collectives,
        "free_bytes": 100e9,
        "model": {
            "parameters": sum(GROUPS),
            "groups": GROUPS,
            "micro_batch": 0.1,
            "optimizer": 1e-11,
            **model,
        },
    }


def strategies(data: dict[str, Any], config: Config | None = None) -> list[str]:
    return [one.strategy for one in prediction.predict(data, config or Config())]


def test_between_slow_links_hybrid_shard_sends_least() -> None:
    assert strategies(told()) == ["hybrid_shard", "ddp", "full_shard"]


def test_by_hand() -> None:
    """Of ddp: 90 million gradients of 4 bytes in 25 MB buckets, beside two small messages."""
    (ddp,) = [one for one in prediction.predict(told(), Config()) if one.strategy == "ddp"]
    buckets = 14  # 360 MB / 25 MiB, rounded up
    expected = 2 * (2e-5 + 1024 / RATE) + buckets * 2e-5 + 360e6 / RATE
    assert ddp.communication == pytest.approx(expected, rel=0.02)
    assert ddp.compute == pytest.approx(0.1 + 90e6 * 1e-11)
    # Hidden behind nothing: communicating takes longer than computing.
    assert ddp.step == ddp.communication
    assert ddp.memory == 16 * 90e6


def test_processors_do_one_thing_at_a_time() -> None:
    for one in prediction.predict(told(device="CPU"), Config()):
        assert one.step == pytest.approx(one.compute + one.communication)


def test_a_step_is_never_shorter_than_its_computing() -> None:
    fast = told(micro_batch=10.0)
    for one in prediction.predict(fast, Config()):
        assert 10.0 < one.step < 10.5


def test_accumulation_sends_less_per_sample_where_it_can() -> None:
    micro = Training(gradient_accumulation=4)
    once = {one.strategy: one for one in prediction.predict(told(), Config())}
    four = {one.strategy: one for one in prediction.predict(told(), Config(training=micro))}
    assert four["ddp"].communication == once["ddp"].communication
    assert four["full_shard"].communication == pytest.approx(
        4 * once["full_shard"].communication, rel=0.01
    )
    whole = Config(training=micro, fsdp=Fsdp("full_shard", accumulate="whole"))
    (made,) = [one for one in prediction.predict(told(), whole) if one.strategy == "full_shard"]
    assert made.communication < four["full_shard"].communication


def test_low_precision_halves_what_is_gathered() -> None:
    sent = {
        precision: prediction.messages(
            "full_shard", GROUPS, [8, 8], Config(training=Training(mixed_precision=precision))
        )
        for precision in ("fp32", "bf16")
    }
    gathered = {
        precision: sum(m.bytes * m.count for m in some if m.collective == "all_gather")
        for precision, some in sent.items()
    }
    assert gathered["fp32"] == 4 * (GROUPS[0] + 2 * sum(GROUPS[1:]))
    assert gathered["bf16"] == gathered["fp32"] / 2


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([8, 8], {("all_gather", "node"), ("reduce_scatter", "node"), ("all_reduce", "across")}),
        ([1, 1], {("all_reduce", "all")}),
        ([8], {("all_gather", "all"), ("reduce_scatter", "all")}),
    ],
)
def test_whom_hybrid_shard_talks_to(counts: list[int], expected: set[tuple[str, str]]) -> None:
    sent = prediction.messages("hybrid_shard", GROUPS, counts, Config())[1:]
    assert {(one.collective, one.scope) for one in sent} == expected


def test_what_does_not_fit_comes_last_and_says_so() -> None:
    data = {**told(), "free_bytes": 1e9}
    found = prediction.predict(data, Config())
    assert [(one.strategy, one.fits) for one in found][-1] == ("ddp", False)
    assert found[0].fits


def test_uneven_nodes_have_no_hybrid_shard() -> None:
    data = told(2, 1)
    data["nodes"][1]["ranks"] = [1, 2]
    data["devices"] = ["H200"] * 3
    assert set(strategies(data)) == {"ddp", "full_shard"}


@pytest.mark.parametrize("named", ["ddp", "no_shard"])
def test_the_configured_one_is_marked(named: str) -> None:
    config = Config(fsdp=Fsdp(sharding_strategy=named))
    (own,) = [one for one in prediction.predict(told(), config) if one.configured]
    assert own.strategy == "ddp"


@pytest.mark.parametrize("change", [{"model": {"why": "x"}}, {"collectives": []}])
def test_without_a_measurement_there_is_no_prediction(change: dict[str, Any]) -> None:
    assert prediction.predict({**told(), **change}, Config()) == []


def test_one_rank_has_nothing_to_choose() -> None:
    assert prediction.predict(told(1, 1), Config()) == []


def test_beyond_the_largest_message_it_says_so() -> None:
    data = told()
    data["collectives"] = [row for row in data["collectives"] if row["bytes"] <= 1 << 20]
    assert all(one.beyond for one in prediction.predict(data, Config()))
    assert not any(one.beyond for one in prediction.predict(told(), Config()))


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(1, 1e-3), (1 << 10, 1e-3), (1 << 12, 2e-3), (1 << 14, 4e-3), (1 << 20, 1.0), (1 << 22, 4.0)],
)
def test_times_between_and_beyond_what_was_measured(size: int, seconds: float) -> None:
    measured = Times(((1 << 10, 1e-3), (1 << 14, 4e-3), (1 << 20, 1.0)))
    assert measured.of(size) == pytest.approx(seconds)


def test_recorded_messages_are_what_a_step_sends() -> None:
    """As test_traffic.py of the engine counts them: two blocks and what is around."""
    groups = [100, 200, 200]
    config = replace(Config(), training=Training(gradient_accumulation=3))
    sent = prediction.messages("hybrid_shard", groups, [2, 2], config)
    counted = {
        name: sum(one.count for one in sent if one.collective == name and one.scope != "all")
        for name in ("all_reduce", "reduce_scatter")
    }
    assert counted == {"all_reduce": 3, "reduce_scatter": 9}
    assert Message("all_reduce", "across", 400.0, 1, 1) in sent
