"""The decoder against a plain one, its loss against a whole one, first values on every mesh."""

from __future__ import annotations

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
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.models import build, losses
from orchestrator.engine.models.decoder import Decoder
from orchestrator.engine.models.losses import Sums

CPU = torch.device("cpu")
SMALL = {"vocab_size": 61, "model_dim": 48, "num_layers": 3, "num_heads": 6, "loss_chunk": 7}


def config(sections: dict[str, Any] | None = None, **model: Any) -> Config:
    sections = {"dataset": {"kind": "synthetic"}, **(sections or {})}
    return parse.build(Config, {**sections, "model": {**SMALL, **model}})


def decoder(seed: int = 0, **model: Any) -> Decoder:
    made = build.build(config(**model))
    assert isinstance(made, Decoder)
    build.initialise(made, seed, CPU)
    with torch.no_grad():  # norms that do something
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
def test_it_computes_what_a_plain_decoder_does(model: dict[str, Any]) -> None:
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


def test_no_token_is_guessed_from_what_follows_it() -> None:
    made, data = decoder(num_kv_heads=3), batch(size=1)
    targets = data["targets"].clamp(min=0)
    for directory in range(1, 11):
        changed = data["inputs"].clone()
        changed[0, directory] = (changed[0, directory] + 1) % 61
        for part, same in ((slice(0, directory), True), (slice(directory, 11), False)):
            results = torch.full_like(targets, -100)
            results[:, part] = targets[:, part]
            losses = [
                made({"inputs": t, "targets": results}).loss for t in (data["inputs"], changed)
            ]
            assert torch.equal(*losses) == same, (directory, part)


def test_only_an_evaluation_counts_what_was_right() -> None:
    made, data = decoder(), batch()
    hidden: list[Tensor] = []
    made.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    made.eval()
    with torch.no_grad():
        sums = made(data)
        best = (hidden[0] @ made.head.weight.T).argmax(-1)
    assert set(sums.extra) == {"correct"}
    assert sums.extra["correct"] == (best == data["targets"]).sum()
    data["targets"] = best
    assert made(data).extra["correct"] == made(data).count == 33


def test_dropout_drops_only_in_training() -> None:
    made, data = decoder(dropout=0.5), batch()
    assert made(data).loss != made(data).loss
    made.eval()
    assert made(data).loss == made(data).loss == decoder().eval()(data).loss


def test_positions_are_told_apart_in_bf16() -> None:
    """The angles are computed in fp32, and in bf16 the loss is still a sum in fp32."""
    made, data = decoder(), batch(size=64, length=40)
    expected = made(data)
    low = made.to(torch.bfloat16)(data)
    assert low.loss.dtype == torch.float32
    assert low.loss.item() == pytest.approx(expected.loss.item(), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["fp32", "autocast"])
def test_blocks_compile_without_a_break(kept: str) -> None:
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


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return found


def head(tokens: int = 200, dim: int = 8, vocab_size: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    own = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, dim, generator=own).requires_grad_()
    weight = torch.randn(vocab_size, dim, generator=own).requires_grad_()
    targets = torch.randint(0, vocab_size, (tokens,), generator=own)
    targets[::7] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 200, 4096])
def test_chunks_change_nothing(chunk: int) -> None:
    hidden, weight, targets = head()
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight))
    sums = losses.summed(hidden, weight, targets, chunk, count_correct=True)
    torch.testing.assert_close(sums.loss, expected)
    found = torch.autograd.grad(3 * sums.loss, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(found, tuple(3 * value for value in wanted), atol=1e-4, rtol=1e-5)
    again = torch.autograd.grad(3 * sums.loss, (hidden, weight))
    assert all(map(torch.equal, found, again))
    assert sums.extra["correct"] == ((hidden @ weight.T).argmax(1) == targets).sum()


def test_logits_of_one_chunk_exist_at_a_time() -> None:
    hidden, weight, targets = head()
    with Largest() as largest:
        losses.summed(hidden, weight, targets, 10, count_correct=False).loss.backward()
    assert largest.numel == 10 * 500  # and the weight's gradient has 8 * 500
    with Largest() as largest, torch.no_grad():
        losses.summed(hidden, weight, targets, 2, count_correct=True)
    assert largest.numel == 8 * 500  # a view of the weight


def test_nothing_to_guess_is_no_loss() -> None:
    hidden, weight, targets = head()
    sums = losses.summed(hidden, weight, targets.fill_(-100), 16, count_correct=True)
    sums.loss.backward()
    assert (sums.loss, sums.count, sums.extra["correct"]) == (0, 0, 0)
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_the_gradient_of_the_head_is_summed_in_fp32() -> None:
    """In bf16, the error grows with the number of chunks: 2.7 times that of one at 16."""
    hidden, weight, targets = head(2048, 16, 300)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    whole = [t.detach().double().requires_grad_() for t in low]
    loss = F.cross_entropy(whole[0] @ whole[1].T, targets, reduction="sum")
    (exact,) = torch.autograd.grad(loss, whole[1])
    errors = []
    for chunk in (2048, 16):
        sums = losses.summed(low[0], low[1], targets, chunk, count_correct=False)
        (found,) = torch.autograd.grad(sums.loss, low[1])
        errors.append(((found - exact).norm() / exact.norm()).item())
    assert errors[1] < 1.5 * errors[0] < 0.01


# -- first values -------------------------------------------------------------------------------


def rows_of(wanted: Config, rank: int, shape: tuple[int, ...], file: Path) -> None:
    """What this process has as one rank of a mesh whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    own = build.build(wanted)
    for block in own.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(own, mesh=mesh)
    build.initialise(own, 3, CPU)
    torch.save({name: weight.to_local().detach() for name, weight in own.named_parameters()}, file)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["decoder", "ranking"])
def test_a_mesh_of_any_shape_begins_with_the_same_values(
    kind: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    words = {"model_dim": 24, "num_layers": 1, "vocab_size": 61, "num_heads": 2}
    more = {"tie_embeddings": True} if kind == "decoder" else {"sparse_features": 300}
    data = {"dataset": {"kind": "synthetic"}, "model": {"kind": kind, **words, **more}}
    wanted = parse.build(Config, data)
    for rank in range(math.prod(shape)):
        pid = os.fork()  # torch remembers the rank of a mesh as long as a process lives
        if pid == 0:
            try:
                rows_of(wanted, rank, shape, tmp_path / str(rank))
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
    alone = build.build(wanted)
    build.initialise(alone, 3, CPU)
    pieces = [torch.load(tmp_path / str(rank)) for rank in range(math.prod(shape))]
    for name, weight in alone.named_parameters():
        for first in range(0, len(pieces), shape[-1]):
            copy = [piece.pop(name) for piece in pieces[first : first + shape[-1]]]
            assert torch.equal(torch.cat(copy), weight), (name, first)
    assert pieces == [{}] * len(pieces)  # tied stays tied


@pytest.mark.parametrize("height", [1, 5, 1000, 3001])
def test_any_rows_can_be_drawn_alone(height: int) -> None:
    shape = torch.Size((3001, 70))  # 936 rows to a block
    whole = torch.full(shape, math.nan)
    for directory, values in build.drawn(7, "w", shape, range(3001), 0.5):
        whole[directory] = values
    assert whole.isfinite().all()
    for first in range(0, 3001, max(height, 277)):
        rows = range(first, min(3001, first + height))
        own = torch.full((len(rows), 70), math.nan)
        for directory, values in build.drawn(7, "w", shape, rows, 0.5):
            own[directory] = values
        assert torch.equal(own, whole[first : first + height])
    assert list(build.drawn(7, "w", shape, range(3001, 3001), 0.5)) == []


def test_first_values_are_spread_as_they_should() -> None:
    made = build.build(config(model_dim=96, vocab_size=999))
    build.initialise(made, 0, CPU)
    weights = {name: weight.detach() for name, weight in made.named_parameters()}
    expected = {
        "embedding.weight": 0.02,
        "head.weight": 0.02,
        "blocks.0.attention.query.weight": 96**-0.5,
        "blocks.1.attention.out.weight": 96**-0.5 / 6**0.5,  # two additions in each of three blocks
        "blocks.1.mlp.gate.weight": 96**-0.5,
        "blocks.2.mlp.down.weight": 256**-0.5 / 6**0.5,
    }
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.03), name
        assert abs(weights[name].mean().item()) < std / 20, name
    assert all((weight == 1).all() for name, weight in weights.items() if "norm" in name)
    matrices = [weight.flatten()[:9] for weight in weights.values() if weight.dim() == 2]
    assert len({tuple(values.tolist()) for values in matrices}) == len(matrices)  # all differ
    other = build.build(config(model_dim=96, vocab_size=999))
    build.initialise(other, 1, CPU)
    assert not torch.equal(other.get_parameter("head.weight"), weights["head.weight"])


def test_first_values_know_compiled_blocks_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    plain, wrapped = build.build(config()), build.build(config())
    wrapped.blocks[0] = torch.compile(wrapped.blocks[0], backend="eager")  # type: ignore[index,operator]
    for model in (plain, wrapped):
        build.initialise(model, 0, CPU)
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_known_at_first() -> None:
    made = build.build(config(vocab_size=256))
    build.initialise(made, 0, CPU)
    sums = made(batch(size=16, vocab_size=256))
    assert sums.loss.item() / sums.count.item() == pytest.approx(math.log(256), abs=0.15)


# -- counting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_six_per_matrix_entry_and_token_and_attention(tied: bool) -> None:
    made = config({"dataset": {"kind": "synthetic", "sequence_length": 32}}, tie_embeddings=tied)
    model = build.build(made)
    matrices = sum(w.numel() for name, w in model.named_parameters() if w.dim() == 2)
    matrices -= 0 if tied else 61 * 48  # the embedding is only looked up
    assert build.flops_per_sample(made, model) == 32 * (6 * matrices + 12 * 3 * 48 * 32)


def test_nobody_knows_the_flops_of_samples_that_a_user_makes() -> None:
    made = config({"dataset": {"target": "mine:data"}})
    assert build.flops_per_sample(made, nn.Identity()) is None


def test_a_llama_has_the_flops_that_the_field_counts() -> None:
    shape = {"vocab_size": 128256, "num_layers": 16, "model_dim": 2048, "num_heads": 32}
    more = {"num_kv_heads": 8, "mlp_hidden_dim": 8192, "tie_embeddings": True}
    made = config({"dataset": {"kind": "synthetic", "sequence_length": 4096}}, **shape, **more)
    model = build.build(made)
    assert sum(w.numel() for w in model.parameters()) == 1_235_814_400  # Llama 3.2 1B
    assert (build.flops_per_sample(made, model) or 0) / 4096 == pytest.approx(9.03e9, rel=0.002)


def test_a_step_counts_tokens_or_samples() -> None:
    training = {"training": {"batch_size": 3, "gradient_accumulation": 2}}
    assert build.nominal_count(config(training), world=4) == 24 * 64
    ranking = parse.build(
        Config, {**training, "model": {"kind": "ranking"}, "dataset": {"kind": "synthetic"}}
    )
    assert build.nominal_count(ranking, world=4) == 24


def test_sums_are_what_a_built_in_model_gives() -> None:
    made = decoder()
    assert isinstance(made(batch()), Sums)
    assert build.loss_of(config())(made, batch()).keys() == {"loss"}
