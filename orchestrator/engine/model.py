"""A small decoder language model over bytes. Called by train.py."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.config import Model

VOCABULARY = 256  # bytes: no tokenizer to ship to the nodes


class Attention(nn.Module):
    """Causal self-attention; positions are told by rotating queries and keys."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.heads, -1).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return mixed


class Block(nn.Module):
    """Attention, then an MLP, each added to what comes in. FSDP shards the model by these."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        mixed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return mixed


class Decoder(nn.Module):
    """Bytes in, the mean loss of guessing each next byte out."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        dim = config.model_dim
        self.head_dim = dim // config.num_heads
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        cos, sin = rotation(inputs.size(1), self.head_dim, inputs.device)
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotation(length: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Angles per position and pair of channels (RoPE, arXiv:2104.09864)."""
    pairs = torch.arange(0, dim // 2, device=device)
    angles = torch.outer(torch.arange(length, device=device), 10000.0 ** (-2 * pairs / dim))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)


def initialise(model: nn.Module, config: Model, seed: int) -> None:
    """The same numbers on every rank and for every mesh: drawn on the CPU, before any sharding."""
    random = torch.Generator().manual_seed(seed)
    into_residual = 1 / math.sqrt(2 * config.num_layers)  # so that depth does not add up (GPT-2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                std = weight.size(1) ** -0.5 if weight.size(0) != VOCABULARY else 0.02
                std *= into_residual if name.endswith(("out.weight", "down.weight")) else 1.0
                weight.normal_(0.0, std, generator=random)
