"""What a step sends between nodes, and what a slow link makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.schema import Config, Fsdp, Model, Training
from orchestrator.head.plan import nccl_transport


def test_the_parameters_of_the_decoder_are_counted_without_torch() -> None:
    llama = Model(
        vocab_size=128256,
        num_layers=16,
        model_dim=2048,
        num_heads=32,
        num_kv_heads=8,
        mlp_hidden_dim=8192,
        tie_embeddings=True,
    )
    assert nccl_transport.parameters(llama) == 1_235_814_400  # Llama 3.2 1B, and what torch counts
    assert nccl_transport.parameters(Model(kind="ranking")) is None


@pytest.mark.parametrize(
    ("settings", "nodes", "sent"),
    [
        ({"fsdp": Fsdp("ddp")}, 2, 400),
        ({"fsdp": Fsdp("hybrid_shard")}, 2, 400),
        ({"fsdp": Fsdp("hybrid_shard", reduce_dtype="bf16")}, 4, 300),
        ({"fsdp": Fsdp("full_shard")}, 2, 600),
        ({"fsdp": Fsdp("shard_grad_op")}, 2, 400),
        (
            {
                "fsdp": Fsdp("full_shard", param_dtype="bf16"),
                "training": Training(mixed_precision="bf16", gradient_accumulation=4),
            },
            2,
            1000,
        ),
        ({}, 1, 0),
    ],
)
def test_what_a_node_sends_in_a_step(settings: dict[str, Any], nodes: int, sent: float) -> None:
    assert nccl_transport.bytes_per_step(Config(**settings), nodes, 100) == sent


def test_how_long_a_link_takes() -> None:
    assert nccl_transport.seconds(400e6, 1000) == pytest.approx(3.2)
