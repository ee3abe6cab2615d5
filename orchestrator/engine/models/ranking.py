"""A ranking transformer, which predicts if a user chooses an item.

Every feature becomes one token: a sparse one (an ID) by an embedding, a dense one (some numbers) by
a projection. The sizes are named as in ROCm/aorta, so that its configs can be read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.config.schema import ModelConfig
from orchestrator.engine.models.losses import LossSums


class RankingBlock(nn.Module):
    """Attention among all features, then an MLP. FSDP shards by blocks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.model_dim
        self.heads, self.dropout = config.num_heads, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, hidden_dim(config))
        self.down = nn.Linear(hidden_dim(config), dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout, self.training)
        mixed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(mixed, self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        batch, features, dim = x.shape
        heads = self.qkv(x).view(batch, features, 3 * self.heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, dim=1))
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, features, dim))
        return mixed


class Ranking(nn.Module):
    """Takes features and labels, and returns the sum of the binary cross entropies."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, features = config.model_dim, config.sparse_features
        # All sparse features share one table: one lookup and one parameter to shard, instead of a
        # small one for each feature.
        self.table = nn.Embedding(features * config.vocab_size, config.embedding_dim)
        self.from_sparse = nn.Linear(config.embedding_dim, dim)
        self.from_dense = nn.Linear(config.dense_dim, dim)
        # Encodes which feature a token is.
        self.feature = nn.Embedding(features + config.num_dense_features, dim)
        self.blocks = nn.ModuleList(RankingBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, batch: dict[str, Tensor]) -> LossSums:
        sparse, config = batch["sparse"], self.config
        first_rows = torch.arange(config.sparse_features, device=sparse.device) * config.vocab_size
        looked_up = self.from_sparse(self.table(sparse + first_rows))
        projected = self.from_dense(batch["dense"].to(looked_up.dtype))
        x = torch.cat((looked_up, projected), dim=1) + self.feature.weight
        x = F.dropout(x, config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).mean(dim=1)).squeeze(1).float()
        label = batch["label"].float()
        loss = F.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        count = torch.full((), len(label), dtype=torch.int64, device=logits.device)
        if self.training:
            return LossSums(loss, count)
        return LossSums(loss, count, {"correct": ((logits > 0) == (label > 0.5)).sum()})

    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        """Return mean and standard deviation of a parameter's initial values."""
        if len(shape) == 1:
            # Norms start at 1, biases at 0.
            return float("norm" in name and name.endswith("weight")), 0.0
        if name in ("table.weight", "feature.weight"):
            return 0.0, 0.02 if name == "feature.weight" else self.config.embedding_dim**-0.5
        added = name.endswith(("out.weight", "down.weight"))
        return 0.0, shape[1] ** -0.5 * ((2 * self.config.num_layers) ** -0.5 if added else 1.0)


def hidden_dim(config: ModelConfig) -> int:
    return config.mlp_hidden_dim or 4 * config.model_dim


def flops_per_sample(config: ModelConfig) -> float:
    """Return the FLOPs of forward and backward for a sample, counted as in the decoder."""
    dim, layers = config.model_dim, config.num_layers
    features = config.sparse_features + config.num_dense_features
    block = 4 * dim * dim + 2 * dim * hidden_dim(config)
    projections = dim * (
        config.sparse_features * config.embedding_dim + config.num_dense_features * config.dense_dim
    )
    matrices = features * layers * block + projections + dim
    return 6.0 * matrices + 12.0 * layers * dim * features * features
