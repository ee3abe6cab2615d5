"""The ranking transformer against a plain one, and what it can learn."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.models import build
from orchestrator.engine.models.ranking import Ranking

CPU = torch.device("cpu")
SMALL = {
    "kind": "ranking",
    "vocab_size": 10,
    "embedding_dim": 6,
    "sparse_features": 3,
    "num_dense_features": 2,
    "dense_dim": 5,
    "model_dim": 16,
    "num_layers": 2,
    "num_heads": 4,
}


def config(**model: Any) -> Config:
    return parse.build_dataclass(
        Config, {"model": {**SMALL, **model}, "dataset": {"kind": "synthetic"}}
    )


def ranking(**model: Any) -> Ranking:
    made = build.build_model(config(**model))
    assert isinstance(made, Ranking)
    build.initialise_model(made, 0, CPU)
    own = torch.Generator().manual_seed(2)
    # Default norms and biases would hide errors.
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=own))
    return made


def batch(size: int = 7) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(5)
    return {
        "sparse": torch.randint(0, 10, (size, 3), generator=own),
        "dense": torch.randn(size, 2, 5, generator=own),
        "label": torch.randint(0, 2, (size,), generator=own).float(),
    }


def plain_norm(x: Tensor, w: dict[str, Tensor], own: str) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * w[f"{own}.weight"] + w[f"{own}.bias"]


def plain_linear(x: Tensor, w: dict[str, Tensor], own: str) -> Tensor:
    return x @ w[f"{own}.weight"].T + w[f"{own}.bias"]


def plain_block(x: Tensor, w: dict[str, Tensor], own: str) -> Tensor:
    q, k, v = plain_linear(plain_norm(x, w, f"{own}.norm1"), w, f"{own}.qkv").chunk(3, -1)
    heads = []
    for part in range(4):
        rows = slice(4 * part, 4 * part + 4)
        heads.append((q[:, rows] @ k[:, rows].T / 2).softmax(-1) @ v[:, rows])
    x = x + plain_linear(torch.cat(heads, -1), w, f"{own}.out")
    y = plain_linear(plain_norm(x, w, f"{own}.norm2"), w, f"{own}.up")
    y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    return x + plain_linear(y, w, f"{own}.down")


def plain_loss(made: Ranking, data: dict[str, Tensor]) -> Tensor:
    """One sample after the other, one feature after the other."""
    w = dict(made.named_parameters())
    loss = torch.zeros(())
    for sparse, dense, label in zip(*data.values(), strict=True):
        rows = [
            w["table.weight"][10 * directory + int(id_)] for directory, id_ in enumerate(sparse)
        ]
        features = [plain_linear(row, w, "from_sparse") for row in rows]
        features += [plain_linear(numbers, w, "from_dense") for numbers in dense]
        x = torch.stack(features) + w["feature.weight"]
        for block in range(2):
            x = plain_block(x, w, f"blocks.{block}")
        chance = plain_linear(plain_norm(x, w, "norm").mean(0), w, "head").sigmoid()
        loss = loss - (chance if label else 1 - chance).log().sum()
    return loss


@pytest.mark.parametrize("hidden", [None, 24])
def test_ranking_computes_as_plain_model(hidden: int | None) -> None:
    made, data = ranking(mlp_hidden_dim=hidden), batch()
    sums = made(data)
    assert sums.count == 7
    assert sums.extra == {}
    found = torch.autograd.grad(sums.loss, list(made.parameters()))
    expected = plain_loss(made, data)
    torch.testing.assert_close(sums.loss, expected, atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad(expected, list(made.parameters()))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_ranking_flops_match_formula() -> None:
    made = build.build_model(config())
    sizes = {name: w.numel() for name, w in made.named_parameters() if w.dim() == 2}
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks"))
    uses = 5 * blocks + 3 * sizes["from_sparse.weight"] + 2 * sizes["from_dense.weight"]
    expected = 6 * (uses + sizes["head.weight"]) + 12 * 2 * 16 * 5 * 5
    assert build.flops_per_sample(config(), made) == expected


def test_labels_keep_precision() -> None:
    made, data = ranking(), batch()
    expected = made(data).loss.item()
    low = made.to(torch.bfloat16)
    halved = {n: v.bfloat16() if v.is_floating_point() else v for n, v in data.items()}
    found = low(halved)
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(expected, rel=0.03)
    assert F.mse_loss(halved["label"].float(), data["label"]) == 0
