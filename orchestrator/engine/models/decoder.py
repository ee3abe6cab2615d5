"""A decoder language model like Llama: RMSNorm, RoPE, gated MLP, grouped-query attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.config.schema import ModelConfig
from orchestrator.engine.models import losses
from orchestrator.engine.models.losses import LossSums


class Attention(nn.Module):
    """Causal self-attention. RoPE on queries and keys encodes the positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.model_dim // config.num_heads
        wide, narrow = config.model_dim, self.kv_heads * self.head_dim
        self.query = nn.Linear(wide, wide, bias=False)
        self.key = nn.Linear(wide, narrow, bias=False)
        self.value = nn.Linear(wide, narrow, bias=False)
        self.out = nn.Linear(wide, wide, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q = self.query(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        grouped = self.kv_heads < self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return mixed


class Mlp(nn.Module):
    """SwiGLU (arXiv:2002.05202): a gate weights the up-projection."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mixed


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection. FSDP shards by blocks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.model_dim
        self.norm1 = nn.RMSNorm(dim, config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(dim, config.norm_eps)
        self.mlp = Mlp(dim, hidden_dim(config))
        self.dropout = config.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x), cos, sin), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Decoder(nn.Module):
    """Takes tokens and their successors, and returns the sum of the cross entropies."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.model_dim, config.norm_eps)
        self.head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, batch: dict[str, Tensor]) -> LossSums:
        inputs, targets = batch["inputs"], batch["targets"]
        config = self.config
        x = self.embedding(inputs)
        x = F.dropout(x, config.dropout, self.training)
        head_dim = config.model_dim // config.num_heads
        cos, sin = rotation_tables(inputs.size(1), head_dim, config.rope_theta, x.device)
        device = x.device.type
        # Under autocast x is fp32, but queries and keys are not. One conversion serves all blocks.
        low = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if low else x.dtype
        cos, sin = cos.to(dtype), sin.to(dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        # Only the head's weight is used, so that all logits never exist at once.
        return losses.cross_entropy_sums(
            self.norm(x).flatten(0, 1),
            self.head.weight,
            targets.flatten(),
            config.loss_chunk,
            count_correct=not self.training,
        )

    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        """Return mean and standard deviation of a parameter's initial values."""
        if len(shape) == 1:
            # These are norms, because no layer has a bias.
            return 1.0, 0.0
        if name in ("embedding.weight", "head.weight"):
            return 0.0, 0.02
        # Projections into the residual stream start smaller, so that depth does not add up (GPT-2).
        added = name.endswith(("out.weight", "down.weight"))
        return 0.0, shape[1] ** -0.5 * ((2 * self.config.num_layers) ** -0.5 if added else 1.0)


def rotation_tables(
    length: int, dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines per position and pair of channels (RoPE, arXiv:2104.09864).

    They are computed in fp32: in bf16, positions beyond 256 are not distinct.
    """
    pairs = torch.arange(0, dim // 2, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta ** (-2 * pairs / dim))
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def hidden_dim(config: ModelConfig) -> int:
    """Return the width of the MLP, by default 8/3 of the model's, rounded up for the GPU.

    Three matrices of that width have as many parameters as two of the usual width 4.
    """
    if config.mlp_hidden_dim is not None:
        return config.mlp_hidden_dim
    step = 256 if config.model_dim >= 1024 else 32
    return -(-8 * config.model_dim // (3 * step)) * step


def flops_per_sample(config: ModelConfig, length: int) -> float:
    """Return the FLOPs of forward and backward for a sample.

    They are 6 per token and matrix element, and 12 per pair of positions and channel in attention.
    As is usual, causality is ignored and embedding lookups count as free.
    """
    dim, layers = config.model_dim, config.num_layers
    narrow = (config.num_kv_heads or config.num_heads) * (dim // config.num_heads)
    block = 2 * dim * dim + 2 * dim * narrow + 3 * dim * hidden_dim(config)
    matrices = layers * block + config.vocab_size * dim
    return length * (6.0 * matrices + 12.0 * layers * dim * length)
