"""Computes what a training step sends between nodes, and how long a link takes for it. Pure."""

from __future__ import annotations

from orchestrator.config.schema import COPIED, Config, Model

TYPICAL = 100_000_000  # parameters, where nobody knows how many there are
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def parameters(model: Model) -> int | None:
    """Count the parameters of the built-in decoder; None for a model that only torch can count."""
    if model.kind != "decoder":
        return None
    width = model.model_dim
    keys = width // model.num_heads * (model.num_kv_heads or model.num_heads)
    hidden = model.mlp_hidden_dim or -(-8 * width // 3)
    block = 2 * width * width + 2 * width * keys + 3 * width * hidden + 2 * width
    embeddings = model.vocab_size * width * (1 if model.tie_embeddings else 2)
    return embeddings + model.num_layers * block + width


def bytes_per_step(config: Config, nodes: int, count: int) -> float:
    """Return what each node sends to the others in one step, for so many parameters.

    An all-reduce in a ring passes 2 (n-1)/n of its data over each link, a gather or a
    reduce-scatter (n-1)/n.
    """
    share = (nodes - 1) / nodes
    summed = 4 if config.fsdp.sharding_strategy in COPIED else BYTES[config.fsdp.reduce_dtype]
    if config.fsdp.sharding_strategy not in ("full_shard", "shard_grad_op"):
        return 2 * share * summed * count
    gathers = 2 if config.fsdp.sharding_strategy == "full_shard" else 1
    gathers *= config.training.gradient_accumulation
    gathered = BYTES[config.training.mixed_precision]
    return share * (summed + gathers * gathered) * count


def seconds(sent: float, megabits: int) -> float:
    """Return how long a link of so many Mb/s takes to send these bytes."""
    return sent * 8 / (megabits * 1e6)
