"""Muon orthogonalises whole matrices on shards, and trains beside AdamW as in a loop by hand."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from orchestrator import Trainer
from orchestrator.common.errors import UsageError
from orchestrator.config import parse
from orchestrator.config.schema import Config
from orchestrator.engine.core import optimizer as optimizers
from orchestrator.engine.core.optimizer import optimizer_factory, step_optimizer
from orchestrator.engine.models import build
from orchestrator.engine.ranks import plain_names
from tests.engine import pair
from tests.engine.by_hand import (
    FIRST,
    by_hand,
    clip_norm,
    clipping,
    far,
    going_on,
    made,
    moved_to_two_ranks_and_back,
    moving,
    net,
    trained,
)
from tests.engine.programs.optimizers import both, matrices

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_groups_left"),
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has it"),
]
SHAPES = [(8, 6), (8, 8), (4, 8), (2, 5), (3, 7), (8, 8), (8, 8)]


# -- on shards -------------------------------------------------------------------------------------


def test_step_on_shards_equals_step_on_whole_matrices(tmp_path: Path) -> None:
    said = pair.run(step_on_shards, tmp_path)
    assert said.count("equal") == 2, said


def step_on_shards(rank: int, directory: Path) -> None:
    """Also between copies of shards, with what is whole, and a few at a time."""
    torch.manual_seed(0)
    first = [torch.randn(shape) for shape in SHAPES]
    apart = {}
    row, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    for name, mesh, places in [
        ("row", row, [Shard(0)]),
        ("columns", row, [Shard(1)]),
        ("copies", square, [Replicate(), Shard(0)]),
    ]:
        for nesterov, dtype in [
            (True, torch.float32),
            (False, torch.float32),
            (True, torch.bfloat16),
        ]:
            wholes = [nn.Parameter(value.to(dtype)) for value in first]
            shards = [nn.Parameter(distribute_tensor(w.detach(), mesh, places)) for w in wholes]
            # Sharding leaves this parameter whole.
            some = nn.Parameter(wholes[0].detach().clone())
            more = {"lr": 1e-2, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
            plain = torch.optim.Muon(wholes, **more)
            spread = torch.optim.Muon([some, *shards[1:]], **more)
            for optimizers.AT_ONCE in (100, 1, 2, 3):
                for one, other in zip(wholes, [some, *shards[1:]], strict=True):
                    one.grad = torch.randn_like(one)
                    spread_out = isinstance(other.data, type(shards[0].data))
                    other.grad = (
                        distribute_tensor(one.grad, mesh, places)
                        if spread_out
                        else one.grad.clone()
                    )
                plain.step()
                step_optimizer(spread)
            found = {
                "whole": some,
                **{str(i): w.full_tensor() for i, w in enumerate(shards[1:], 1)},
            }
            expected = {"whole": wholes[0], **{str(i): w for i, w in enumerate(wholes[1:], 1)}}
            apart[name, nesterov, dtype] = far(found, expected)
    print({name: distance for name, distance in apart.items() if distance} or "equal", flush=True)


def test_matrix_without_row_on_a_rank_is_refused(tmp_path: Path) -> None:
    assert pair.run(refuse_a_row, tmp_path).count("refused") == 2


def refuse_a_row(rank: int, directory: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 1, bias=False))
    with pytest.raises(UsageError, match=r"matrix of shape \(1, 6\), with fewer rows than the 2"):
        Trainer(model, matrices(model.parameters()), functional.mse_loss, strategy="full_shard")
    print("refused", flush=True)


# -- trainings -------------------------------------------------------------------------------------


def test_one_process_trains_and_resumes_as_plain_loop(tmp_path: Path) -> None:
    assert far(trained(made(both)), by_hand(both)) < 1e-6
    assert far(trained(made(both), FIRST), by_hand(both, None, FIRST)) < 1e-6
    assert going_on(both, tmp_path) == 0


def test_two_ranks_train_and_resume_as_plain_loop(tmp_path: Path) -> None:
    moved_to_two_ranks_and_back(both, train_on_two_ranks, tmp_path)


def train_on_two_ranks(rank: int, directory: Path) -> None:
    clipped, alone = by_hand(clipping(both, clip_norm)), by_hand(matrices)
    more = {"strategy": "full_shard", "accumulate": 2}
    apart = {
        "ddp": far(trained(made(both, strategy="ddp", accumulate=2)), by_hand(both)),
        "full_shard": far(trained(made(both, **more)), by_hand(both)),
        "alone": far(trained(made(matrices, **more)), alone),
        "clipped": far(trained(made(both, clip_grad_norm=0.05, **more)), clipped),
        "goes on": 1e6 * going_on(both, directory / "kept", **more),
    }
    trained(made(both, strategy="full_shard"), max_period="5 steps", **moving(directory))
    print({n: distance for n, distance in apart.items() if distance > 1e-6} or "equal", flush=True)


# -- from a config ---------------------------------------------------------------------------------


def test_config_gives_muon_matrices_of_blocks() -> None:
    keys = {"name": "muon", "lr": 1e-3, "muon_lr": 2e-2, "weight_decay": 0.1}
    config = parse.build_dataclass(Config, {"optimizer": keys})
    model = build.build_model(config)
    names = {id(p): name for name, p in plain_names.named_parameters(model)}
    parts = optimizer_factory(config, model)(list(model.parameters()))
    groups = [
        ({names[id(p)] for p in group["params"]}, group["lr"], group["weight_decay"])
        for part in parts
        for group in part.param_groups
    ]
    assert [group[1:] for group in groups] == [(2e-2, 0.1), (1e-3, 0.1), (1e-3, 0.0)]
    (hidden, *_), (wide, *_), (vectors, *_) = groups
    assert hidden == {
        n for n in names.values() if n.startswith("blocks.") and n.endswith("weight")
    } - {n for n in names.values() if "norm" in n}
    assert wide == {"embedding.weight", "head.weight"}
    assert all("norm" in name for name in vectors)
    assert {type(part) for part in parts} == {torch.optim.Muon, AdamW}


def test_muon_refuses_model_without_blocks() -> None:
    config = parse.build_dataclass(Config, {"optimizer": {"name": "muon"}})
    with pytest.raises(UsageError, match=r"matrices inside repeated blocks.*has none"):
        optimizer_factory(config, net())


# -- lists of optimizers ---------------------------------------------------------------------------


def test_list_of_optimizers_calls_each_as_alone() -> None:
    """Its hooks are called, and it keeps its own state and groups; a scheduler sees all groups."""
    model, heard = net(), []
    parts: list[Optimizer] = [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
        AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-3),
    ]
    before = [(vars(part), dict(vars(part))) for part in parts]
    for part in parts:
        part.register_step_post_hook(lambda which, *_: heard.append(type(which).__name__))
    falls = torch.optim.lr_scheduler.ExponentialLR
    trainer = Trainer(
        model, parts, functional.mse_loss, scheduler=lambda optimizer: falls(optimizer, 0.5)
    )
    trained(trainer, max_period="2 steps")
    assert heard == ["Muon", "AdamW"] * 2
    assert all(now[name] is kept for now, was in before for name, kept in was.items())
    assert [part.param_groups[0]["lr"] for part in parts] == [1e-2 / 4, 1e-3 / 4]
    assert type(trainer.optimizer).__name__ == "Muon+AdamW"
    with pytest.raises(UsageError, match="the scheduler belongs to another optimizer"):
        Trainer(model, parts, functional.mse_loss, scheduler=falls(parts[0], 0.5))
