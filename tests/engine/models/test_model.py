"""The decoder against a plain one, its loss against a whole one, first values on every mesh."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.models import build, losses
from orchestrator.engine.models.decoder import Decoder

CPU = torch.device("cpu")
SMALL = {"vocab_size": 61, "model_dim": 48, "num_layers": 3, "num_heads": 6, "loss_chunk": 7}


def config(sections: dict[str, Any] | None = None, **model: Any) -> Config:
    sections = {"dataset": {"kind": "synthetic"}, **(sections or {})}
    return parse.build_dataclass(Config, {**sections, "model": {**SMALL, **model}})


def decoder(seed: int = 0, **model: Any) -> Decoder:
    made = build.build_model(config(**model))
    assert isinstance(made, Decoder)
    build.initialise_model(made, seed, CPU)
    # Norms with a weight of one would hide errors.
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator()))
    return made


def batch(size: int = 3, length: int = 11, vocab_size: int = 61) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, vocab_size, (size, length + 1), generator=own)
    targets = tokens[:, 1:].clone()
    targets[0, :4] = -100
    targets[-1, -1] = -100
    return {"inputs": tokens[:, :-1], "targets": targets}


# -- an independent decoder, as the papers write it ---------------------------------------------


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_turn(x: Tensor, theta: float) -> Tensor:
    """(heads, length, dim), by multiplication with complex numbers of length one."""
    half = x.size(-1) // 2
    speeds = torch.tensor([theta ** (-i / half) for i in range(half)])
    angles = torch.arange(x.size(-2))[:, None] * speeds
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), angles)
    return torch.cat((turned.real, turned.imag), -1)


def plain_attention(x: Tensor, w: dict[str, Tensor], made: Decoder, own: str) -> Tensor:
    c = made.config
    kv = c.num_kv_heads or c.num_heads
    length, size = x.size(0), c.model_dim // c.num_heads
    q, k, v = (
        (x @ w[f"{own}{name}.weight"].T).view(length, heads, size).transpose(0, 1)
        for name, heads in (("query", c.num_heads), ("key", kv), ("value", kv))
    )
    q, k = plain_turn(q, c.rope_theta), plain_turn(k, c.rope_theta)
    k, v = (t.repeat_interleave(c.num_heads // kv, 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(size)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
    return mixed @ w[f"{own}out.weight"].T


def plain_loss(made: Decoder, data: dict[str, Tensor]) -> Tensor:
    """The sum over all targets, one sequence after the other, all logits at once."""
    c, w = made.config, dict(made.named_parameters())
    loss = torch.zeros(())
    for inputs, targets in zip(data["inputs"], data["targets"], strict=True):
        x = w["embedding.weight"][inputs]
        for i in range(c.num_layers):
            own = f"blocks.{i}."
            normed = plain_norm(x, w[f"{own}norm1.weight"], c.norm_eps)
            x = x + plain_attention(normed, w, made, f"{own}attention.")
            y = plain_norm(x, w[f"{own}norm2.weight"], c.norm_eps)
            gate, up = (y @ w[f"{own}mlp.{name}.weight"].T for name in ("gate", "up"))
            x = x + (gate * gate.sigmoid() * up) @ w[f"{own}mlp.down.weight"].T
        head = w["embedding.weight" if c.tie_embeddings else "head.weight"]
        logits = plain_norm(x, w["norm.weight"], c.norm_eps) @ head.T
        each = logits.logsumexp(-1) - logits[torch.arange(len(targets)), targets.clamp(min=0)]
        loss = loss + each[targets != -100].sum()
    return loss


def gradients(made: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    loss.backward()
    return {name: w.grad.clone() for name, w in made.named_parameters() if w.grad is not None}


KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "grouped": {"num_kv_heads": 2},
    "one key": {"num_kv_heads": 1, "rope_theta": 500.0},
    "tied": {"tie_embeddings": True},
    "chunks of 1": {"loss_chunk": 1},
    "whole": {"loss_chunk": 4096, "norm_eps": 1e-3, "mlp_hidden_dim": 20},
}


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_decoder_computes_as_plain_decoder(model: dict[str, Any]) -> None:
    made, data = decoder(**model), batch()
    sums = made(data)
    assert sums.count == 3 * 11 - 5
    assert sums.extra == {}
    expected = plain_loss(made, data)
    torch.testing.assert_close(sums.loss, expected, atol=1e-5, rtol=1e-6)
    found, wanted = gradients(made, sums.loss / 28), gradients(made, expected / 28)
    assert found.keys() == wanted.keys() == dict(made.named_parameters()).keys()
    assert ("head.weight" in found) != made.config.tie_embeddings
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_decoder_in_bf16_keeps_positions_apart() -> None:
    """The angles are computed in fp32, and in bf16 the loss is still a sum in fp32."""
    made, data = decoder(), batch(size=64, length=40)
    expected = made(data)
    low = made.to(torch.bfloat16)(data)
    assert low.loss.dtype == torch.float32
    assert low.loss.item() == pytest.approx(expected.loss.item(), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["fp32", "autocast"])
def test_blocks_compile_without_graph_break(kept: str) -> None:
    made, data = decoder(num_kv_heads=2), batch()
    expected = made(data).loss.item()
    for block in made.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    if kept == "fp32":
        found = made(data).loss
        assert found.item() == pytest.approx(expected, rel=1e-6)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            found = made(data).loss
        assert found.item() == pytest.approx(expected, rel=1e-2)
    assert all(weight.isfinite().all() for weight in gradients(made, found).values())


# -- the loss, a chunk at a time ----------------------------------------------------------------


def head(tokens: int = 200, dim: int = 8, vocab_size: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    own = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, dim, generator=own).requires_grad_()
    weight = torch.randn(vocab_size, dim, generator=own).requires_grad_()
    targets = torch.randint(0, vocab_size, (tokens,), generator=own)
    targets[::7] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 200, 4096])
def test_chunked_loss_equals_whole_loss(chunk: int) -> None:
    hidden, weight, targets = head()
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight))
    sums = losses.cross_entropy_sums(hidden, weight, targets, chunk, count_correct=True)
    torch.testing.assert_close(sums.loss, expected)
    found = torch.autograd.grad(3 * sums.loss, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(found, tuple(3 * value for value in wanted), atol=1e-4, rtol=1e-5)
    again = torch.autograd.grad(3 * sums.loss, (hidden, weight))
    assert all(map(torch.equal, found, again))
    assert sums.extra["correct"] == ((hidden @ weight.T).argmax(1) == targets).sum()


def test_loss_without_targets_is_zero() -> None:
    hidden, weight, targets = head()
    sums = losses.cross_entropy_sums(hidden, weight, targets.fill_(-100), 16, count_correct=True)
    sums.loss.backward()
    assert (sums.loss, sums.count, sums.extra["correct"]) == (0, 0, 0)
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


# -- first values -------------------------------------------------------------------------------


def rows_of(wanted: Config, rank: int, shape: tuple[int, ...], file: Path) -> None:
    """Write this rank's shards in a mesh whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    own = build.build_model(wanted)
    for block in own.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(own, mesh=mesh)
    build.initialise_model(own, 3, CPU)
    torch.save({name: weight.to_local().detach() for name, weight in own.named_parameters()}, file)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["decoder", "ranking"])
def test_mesh_of_any_shape_starts_with_same_values(
    kind: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    words = {"model_dim": 24, "num_layers": 1, "vocab_size": 61, "num_heads": 2}
    more = {"tie_embeddings": True} if kind == "decoder" else {"sparse_features": 300}
    data = {"dataset": {"kind": "synthetic"}, "model": {"kind": kind, **words, **more}}
    wanted = parse.build_dataclass(Config, data)
    for rank in range(math.prod(shape)):
        # Torch remembers the rank of a mesh as long as a process lives.
        pid = os.fork()
        if pid == 0:
            try:
                rows_of(wanted, rank, shape, tmp_path / str(rank))
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
    alone = build.build_model(wanted)
    build.initialise_model(alone, 3, CPU)
    pieces = [torch.load(tmp_path / str(rank)) for rank in range(math.prod(shape))]
    for name, weight in alone.named_parameters():
        for first in range(0, len(pieces), shape[-1]):
            copy = [piece.pop(name) for piece in pieces[first : first + shape[-1]]]
            assert torch.equal(torch.cat(copy), weight), (name, first)
    # Tied weights stay tied.
    assert pieces == [{}] * len(pieces)


def test_initialise_handles_compiled_blocks_and_keeps_random_state() -> None:
    state = torch.get_rng_state()
    plain, wrapped = build.build_model(config()), build.build_model(config())
    wrapped.blocks[0] = torch.compile(wrapped.blocks[0], backend="eager")  # type: ignore[index,operator]
    for model in (plain, wrapped):
        build.initialise_model(model, 0, CPU)
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


# -- counting -----------------------------------------------------------------------------------


def test_llama_has_published_flops() -> None:
    shape = {"vocab_size": 128256, "num_layers": 16, "model_dim": 2048, "num_heads": 32}
    more = {"num_kv_heads": 8, "mlp_hidden_dim": 8192, "tie_embeddings": True}
    made = config({"dataset": {"kind": "synthetic", "sequence_length": 4096}}, **shape, **more)
    model = build.build_model(made)
    # This is the size of Llama 3.2 1B.
    assert sum(w.numel() for w in model.parameters()) == 1_235_814_400
    assert (build.flops_per_sample(made, model) or 0) / 4096 == pytest.approx(9.03e9, rel=0.002)


def test_nominal_count_is_tokens_or_samples() -> None:
    training = {"training": {"batch_size": 3, "gradient_accumulation": 2}}
    assert build.nominal_count(config(training), world=4) == 24 * 64
    ranking = parse.build_dataclass(
        Config, {**training, "model": {"kind": "ranking"}, "dataset": {"kind": "synthetic"}}
    )
    assert build.nominal_count(ranking, world=4) == 24
