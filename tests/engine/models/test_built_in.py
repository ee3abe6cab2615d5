"""The built-in models on the whole engine: the same on any layout, with and without its options."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.core.test_parity import fsdp
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

STEPS = 4
DECODER: dict[str, dict[str, Any]] = {
    # A seed by whose samples these steps do not enlarge the rounding of sums.
    "training": {"seed": 1, "max_steps": STEPS, "batch_size": 12},
    "model": {"model_dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2},
    "dataset": {"kind": "synthetic", "num_samples": 500, "sequence_length": 24},
    "optimizer": {"lr": 0.01},
    "logging": {"interval": 1},
    "checkpoint": {"at_end": False},
}
RANKING: dict[str, dict[str, Any]] = {
    **DECODER,
    "model": {"kind": "ranking", "model_dim": 16, "vocab_size": 50},
    "dataset": {"kind": "synthetic", "num_samples": 500},
}


def job(directory: Path, name: str, nodes: list[int], base: Any, *changes: dict[str, Any]) -> Job:
    made = {section: dict(values) for section, values in base.items()}
    for change in changes:
        for section, values in change.items():
            made[section] = {**made.get(section, {}), **values}
    made["training"]["batch_size"] //= sum(nodes)
    return Job(str(directory / name), nodes, made)


def losses(job: Job) -> list[float]:
    return [line["loss"] for line in job.metrics()]


def norms(job: Job) -> list[float]:
    return [line["grad_norm"] for line in job.metrics()]


@pytest.mark.parametrize(
    ("base", "sharded"),
    [(DECODER, ([2, 2], {})), (RANKING, ([3], fsdp("full_shard")))],
    ids=["decoder", "ranking"],
)
def test_first_weights_are_independent_of_mesh(
    tmp_path: Path, base: Any, sharded: tuple[list[int], dict[str, Any]]
) -> None:
    """They are made shard by shard; the losses from the first on are those of one process."""
    # AdamW divides by the size of gradients, which turns the rounding of their sums into steps.
    own = {"optimizer": {"name": "sgd", "lr": 0.1}, "model": {"tie_embeddings": base is DECODER}}
    nodes, how = sharded
    jobs = [
        job(tmp_path, "alone", [1], base, own),
        job(tmp_path, "sharded", nodes, base, own, how),
        job(tmp_path, "ddp", [2], base, own, fsdp("ddp")),
    ]
    assert run(*jobs) == [[0] * sum(one.nodes) for one in jobs]
    for other in jobs[1:]:
        assert losses(other) == pytest.approx(losses(jobs[0]), abs=2e-6), other.directory
        assert norms(other) == pytest.approx(norms(jobs[0]), abs=2e-6), other.directory


def options(section: str, **values: Any) -> dict[str, Any]:
    return {section: values}


def test_memory_and_speed_options_change_no_number(tmp_path: Path) -> None:
    how = {
        "plain": {},
        "recomputed": options("training", activation_checkpointing="full"),
        "partly": options("training", activation_checkpointing="selective"),
        "partly, and compiled": {
            **options("training", activation_checkpointing="selective"),
            **options("compile", enabled=True, backend="aot_eager"),
        },
        "by workers": options("dataloader", num_workers=2, prefetch_factor=3),
        "in chunks": options("model", loss_chunk=7),
    }
    fewer = options("model", num_layers=2)
    jobs = {name: job(tmp_path, name, [2], DECODER, fewer, change) for name, change in how.items()}
    assert set(map(tuple, run(*jobs.values()))) == {(0, 0)}
    for name, one in jobs.items():
        assert losses(one) == pytest.approx(losses(jobs["plain"]), abs=1e-5), name
        assert norms(one) == pytest.approx(norms(jobs["plain"]), abs=1e-5), name
