"""The Trainer's numbers are those of a plain loop in every setup, and it can be resumed."""

import functools
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from orchestrator.engine import export
from orchestrator.engine.core import stopping
from orchestrator.engine.core.optimizer import LrScheduler
from orchestrator.engine.core.stopping import TrainState
from orchestrator.engine.data import rounds as in_rounds
from orchestrator.engine.data.rounds import Order
from tests.engine.data.test_loaders import ranks as ranks_of
from tests.engine.programs import trainings as trained
from tests.engine.worlds import PROGRAMS, Job, run

pytestmark = pytest.mark.slow

WORLDS = ([1], [2, 2])


def done(directory: Path, name: str, nodes: list[int], function: str, **more: Any) -> Job:
    job = Job(str(directory / name), nodes, {}, call=f"{PROGRAMS}.trainings:{function}", **more)
    (codes,) = run(job)
    results = "\n".join(job.output(rank) for rank in range(sum(nodes)))
    assert codes == [0] * sum(nodes), results
    return job


def plain_loop() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """One process, one batch per step as large as all micro-batches of all ranks."""
    model, data = trained.net(), trained.samples()
    optimizer = trained.warmed(model)
    order = Order(len(data), 0, shuffle=True)
    rows = trained.BATCH * trained.ACCUMULATE
    history, steps = [], 0
    for epoch in range(trained.EPOCHS):
        places = order.of_epoch(epoch, range(len(data)))
        loss_sum = right = count = 0.0
        for first in range(0, len(places), rows):
            x, y = data[places[first : first + rows]]
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), trained.CLIP)
            steps += 1
            for group, lr in zip(optimizer.param_groups, (0.05, 0.02), strict=True):
                group["lr"] = lr * min(1.0, steps / 3)
            optimizer.step()
            optimizer.zero_grad()
            kept = int((y >= 0).sum())
            loss_sum, count = loss_sum + loss.item() * kept, count + kept
            right += int((out.argmax(-1) == y)[y >= 0].sum())
        x, y = trained.samples(13)[:]
        with torch.no_grad():
            out = model(x)
        history.append(
            {
                "epoch": epoch + 1,
                "step": steps,
                "train_loss": loss_sum / count,
                "train_correct": right / count,
                "val_loss": nn.functional.cross_entropy(out, y).item(),
                "val_correct": (out.argmax(-1) == y)[y >= 0].float().mean().item(),
            }
        )
    return {name: p.detach() for name, p in model.named_parameters()}, history


def test_every_strategy_computes_as_plain_loop(tmp_path: Path) -> None:
    expected, history = plain_loop()
    for nodes in WORLDS:
        job = done(tmp_path, f"world{sum(nodes)}", nodes, "every_strategy")
        found = torch.load(job.path / "found")
        assert found.keys() >= set(trained.MORE)
        for strategy, (parameters, results) in found.items():
            for name, value in expected.items():
                torch.testing.assert_close(
                    parameters[name], value, atol=1e-5, rtol=0, msg=f"{nodes} {strategy} {name}"
                )
            for one, other in zip(results, history, strict=True):
                assert one == pytest.approx(other, abs=1e-5), (nodes, strategy)


def test_resume_equals_uninterrupted_run(tmp_path: Path) -> None:
    job = done(tmp_path, "two", [2], "resumes")
    assert "resuming after step 3" in job.output()
    assert "nothing to do: 2 epochs and 6 steps are done" in job.output()


def test_resume_on_other_ranks_continues_samples(tmp_path: Path) -> None:
    def ended(name: str, nodes: list[int], kept: str, **env: str) -> Any:
        env = {"KEPT": str(tmp_path / kept), **env}
        job = done(tmp_path, name, nodes, "goes_on_elsewhere", env=env)
        return torch.load(job.path / "ended")

    _, expected = ended("whole", [1], "a")
    ended("begun", [2], "b", UNTIL="8 steps")
    _, weights = ended("on", [1], "b")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=0, msg=name)


def test_relaunch_resumes_its_own_run(tmp_path: Path) -> None:
    job = done(tmp_path, "again", [2], "launched_again")
    said = job.output().splitlines()
    resumed = [line for line in said if line.startswith("resuming")]
    assert len(resumed) == 1
    runs = [job.path / f"mine_2026010{day}_000000/outputs/checkpoints" for day in (1, 2, 3)]
    assert resumed[0].startswith(f"resuming after step 6, from {runs[0]}/step_00000006: ")
    assert "; saved by a.py on " in resumed[0]
    passed = [line for line in said if "are skipped" in line][-2:]
    assert passed[0].startswith(f"the checkpoints in {runs[2]} are skipped: a.py on ")
    assert "saved them with another model" in passed[0]
    assert passed[1].startswith(f"the checkpoints in {runs[1]} are skipped: saved by b.py on ")
    assert passed[1].endswith("this is a.py")


def test_low_precision_is_equal_for_every_strategy(tmp_path: Path) -> None:
    job = done(tmp_path, "low", [2], "low_precision")
    for precision in ("bf16", "fp16"):
        found = torch.load(job.path / precision)
        for strategy, weights in found.items():
            for name, value in found["ddp"].items():
                torch.testing.assert_close(
                    weights[name], value, atol=1e-5, rtol=0, msg=f"{precision} {strategy} {name}"
                )


def test_running_statistics_are_validated_and_saved(tmp_path: Path) -> None:
    done(tmp_path, "statistics", [2], "running_statistics")


def test_signal_to_group_leaves_workers_running(tmp_path: Path) -> None:
    done(tmp_path, "group", [1], "stopped_with_workers")


def test_signal_ends_validation(tmp_path: Path) -> None:
    done(tmp_path, "validation", [2], "stopped_in_a_validation")


def test_stop_saves_without_validation(tmp_path: Path) -> None:
    done(tmp_path, "hurry", [2], "stops_in_a_hurry")


def test_sample_with_nan_is_named_and_skipped(tmp_path: Path) -> None:
    job = done(tmp_path, "nan", [2], "meets_nan")
    named = re.findall(
        r"is skipped on all ranks: NaN or inf in samples \[(.*)\]", job.output(0) + job.output(1)
    )
    # Each of the two trainings named it once, on the rank that had it.
    assert len(named) == 2
    assert all("7" in samples.split(", ") for samples in named)


SCHEDULERS: dict[str, Any] = {
    "partial": lambda opt: lr_scheduler.LambdaLR(opt, functools.partial(min, 0.5)),
    "sequence": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=4), lr_scheduler.ExponentialLR(opt, 0.5)], [4]
    ),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_resumes(name: str) -> None:
    def begun() -> tuple[torch.optim.Optimizer, LrScheduler]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        return optimizer, LrScheduler(SCHEDULERS[name], optimizer, "step")

    def rates(optimizer: torch.optim.Optimizer, scheduler: LrScheduler, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.after_step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    one = begun()
    rates(*one, 5)
    saved = json.loads(json.dumps(one[1].state()))
    other = begun()
    other[1].restore(saved)
    for group, own in zip(other[0].param_groups, one[0].param_groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    assert rates(*other, 8) == rates(*one, 8)


def test_invalid_set_up_is_refused_on_all_ranks(tmp_path: Path) -> None:
    job = done(tmp_path, "refuses", [2], "refuses")
    for rank in range(2):
        results = json.loads((job.path / f"results_{rank}").read_text())
        for name, words in {
            "none": "strategy='none' is for one process, and here are 2",
            "dp": "strategy='dp' is for one process",
            "other": "the model is not the same on all ranks",
            "sampler": "it is made for rank 0 of 3",
            "streams": "the ranks draw different samples",
            "short": "fewer batches than there are ranks",
            "absent": "there is no checkpoint in",
            "nan": "10 steps in a row had NaN or inf",
        }.items():
            assert words in results[name], (rank, name)
    assert not (job.path / "no").exists()


def test_trackers_hear_rank_0_and_broken_one_is_dropped(tmp_path: Path) -> None:
    job = done(tmp_path, "tracks", [2], "tracks")
    first, other = (json.loads((job.path / f"results_{rank}").read_text()) for rank in range(2))
    for results in (first, other):
        assert "'wandb' needs a package that" in results["missing"]
        assert "-m pip install wandb" in results["missing"]
        assert "did you mean 'tensorboard'" in results["name"]
        assert "3 has no log(values, step) and close()" in results["thing"]
        assert "tensorboard could not be opened" in results["option"]
        assert "logdri" in results["option"]
        assert int(results["shut"]) > 0 and int(results["hangs"]) > 0
    assert other["book"] == other["broken"] == []
    assert "WARNING: tensorboard could not be opened, and gets no values: " in job.output()
    assert "mlflow does not open yet; nothing waits for it" in job.output()
    assert "WARNING: mlflow did not take all values within 0.1 s" in job.output()
    assert "Broken failed and is switched off from now on: no network" in job.output()
    assert [call[0] for call in first["broken"]] == ["log"]
    *heard, closed = first["book"]
    assert closed == ["close"]
    _, metrics, steps = zip(*heard, strict=True)
    assert steps == (1, 2, 4, 6, 6)
    parts = {"data_ms", "forward_backward_ms", "optimizer_ms", "step_ms"}
    assert metrics[0].keys() >= {"loss", "lr", "grad_norm", "epoch", "tokens_per_s", *parts}
    assert metrics[-1].keys() == {"epoch", "train_loss", "val_loss"}
    # A save between two lines takes nothing from the speed.
    lines = list(zip(steps, metrics, strict=True))[:-1]
    for (before, earlier), (step, line) in itertools.pairwise(lines):
        seconds = line["step_ms"] * (step - before) / 1e3
        assert line["tokens_per_s"] * seconds == pytest.approx(line["tokens"] - earlier["tokens"])


def test_trainer_warns_and_refuses_as_documented(tmp_path: Path) -> None:
    job = done(tmp_path, "promises", [2], "promises")
    said = job.output()
    assert "learning rates are multiplied by 2, the number of ranks" in said
    assert "cannot be trusted" in said
    assert "4 of 6 are not in the optimizer" in said
    for rank in range(2):
        results = json.loads((job.path / f"results_{rank}").read_text())
        for name, words in {
            "later": "holds step 5 of another run, and this one is at step 0",
            "stranger": "a parameter of shape (6, 6) that is not the model's",
            "twice": "after another Trainer, which has cut this one into shards, make it again",
            "endless": "train() has no end",
            "period": "'parsecs' is not a unit",
            "bare period": "a number above 0 with a unit",
            "strategy": "did you mean 'hybrid_shard'",
            "config": "did you mean 'shard_size'",
            "both": "either loss= or step=",
            "sum": 'reduction="sum"',
            "batch": "a batch is a Tensor",
            "file": "is a file, and a checkpoint of several ranks is a directory",
        }.items():
            assert words in results[name], (rank, name, results[name])


def test_hooks_are_called_and_random_state_is_kept(tmp_path: Path) -> None:
    job = done(tmp_path, "hooks", [2], "tells_its_owner")
    for rank in range(2):
        ended, plain, begin, *calls, end, short = json.loads(
            (job.path / f"results_{rank}").read_text()
        )
        assert short == [[0, 1], []], "before the first step, which saves nothing; after it"
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)

        def drawn() -> list[float]:
            return [torch.rand(1).item(), random.random(), np.random.rand()]

        first = drawn()
        assert plain == ["end", 12, first], "as if no training had been in between"
        assert begin == ["begin", 0, True]
        assert [call[:2] for call in calls] == [
            *[["step", 1], ["step", 2], ["step", 3], ["step", 4], ["step", 5], ["epoch", 5]],
        ]
        expected = [first, *(drawn() for _ in range(6))]
        assert [call[2] for call in [*calls, end]] == expected
        assert ended.startswith("ended by a hook that returned True")


def test_interrupted_epoch_has_one_line_of_history() -> None:
    state = TrainState()
    seen = []
    # Two runs were interrupted in the first epoch, and one later.
    for epoch in (0, 0, 1, 2, 2, 3):
        state.add_to_history({"epoch": epoch})
        seen.append([int(line["epoch"]) for line in state.history])
    assert seen == [[0], [0], [1], [1, 2], [1, 2, 2], [1, 2, 3]]


def test_best_is_kept_and_patience_ends_training(tmp_path: Path) -> None:
    job = done(tmp_path, "best", [2], "keeps_the_best")
    for rank in range(2):
        results = json.loads((job.path / f"results_{rank}").read_text())
        refused, history, ended, best, evaluated, epoch, there = results
        assert "'val_loss' is not among the metrics of this training" in refused
        losses = [line["val_loss"] for line in history]
        lowest = losses.index(min(losses))
        assert 0 < lowest == len(losses) - 4
        assert ended == "no better val_loss came in 3 evaluations"
        assert best == losses[lowest] == evaluated["loss"]
        assert epoch == lowest + 1
        steps = [f"step_{history[directory]['step']:08d}" for directory in (lowest, -1)]
        assert there == ["best", *steps]


def test_step_may_use_any_part_of_model(tmp_path: Path) -> None:
    """Its other methods, attributes, parts and weights; the numbers are those of one process."""
    job = done(tmp_path, "alone", [1], "all_of_a_model")
    expected = torch.load(job.path / "found")
    job = done(tmp_path, "two", [2], "all_of_a_model")
    expected |= {(2, k): v for k, v in torch.load(job.path / "found").items()}
    weights, loss = expected.pop("none")
    for name, (parameters, value) in expected.items():
        assert value == pytest.approx(loss, abs=1e-5), name
        for key, own in weights.items():
            torch.testing.assert_close(parameters[key], own, atol=1e-5, rtol=0, msg=f"{name} {key}")


@pytest.mark.parametrize("nodes", [[1], [2, 2]], ids=str)
def test_whole_weights_are_written_and_exported(tmp_path: Path, nodes: list[int]) -> None:
    torch.manual_seed(0)
    model = trained.Tied()
    job = done(tmp_path, "away", nodes, "gives_itself_away")
    for rank in range(sum(nodes)):
        results = torch.load(job.path / f"results_{rank}")
        assert "is not a kind of file that can be written" in results.pop("where")
        assert "JobFailed" in results["disk"] and "No such file or directory" in results.pop("disk")
    for strategy in results:
        directory = job.path / strategy
        export.export_weights(
            directory / "kept/step_00000000", directory / "exported", layout="huggingface"
        )
        for found in (
            read_directory(directory / "whole"),
            read_directory(directory / "exported"),
            load_file(job.path / f"{strategy}-one.safetensors"),
            torch.load(job.path / f"{strategy}-one.pt"),
        ):
            trained.Tied().load_state_dict(found, strict=True)
            for name, value in model.state_dict().items():
                assert torch.equal(found[name], value), (strategy, name)


def read_directory(directory: Path) -> dict[str, torch.Tensor]:
    assert json.loads((directory / "config.json").read_text()) == {"architectures": ["Tied"]}
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "seconds", "unit"),
    [("30s", 30, "seconds"), ("2m", 120, "seconds"), ("1.5h", 5400, "seconds"),
     ("2 days", 172800, "seconds"), ("1000 steps", 1000, "steps"), ("3e", 3, "epochs"),
     ("10 minutes", 600, "seconds"), ("5st", 5, "steps"), ("1epoch", 1, "epochs")],
)  # fmt: skip
def test_parse_period_reads_units(text: str, seconds: float, unit: str) -> None:
    assert stopping.parse_period("max_period", text) == stopping.Duration(seconds, unit)


@settings(deadline=None)
@given(
    *(st.integers(0, 60), st.integers(1, 5), st.booleans(), st.integers(1, 5)),
    st.sampled_from([1, 7, in_rounds.PLACES_AT_ONCE]),
)
def test_batches_of_all_ranks_are_those_of_one(
    size: int, batch: int, drop: bool, world: int, at_once: int
) -> None:
    """None twice, none left out, and as many batches on every rank, however many are computed at
    a time."""
    with mock.patch.object(in_rounds, "PLACES_AT_ONCE", at_once):
        ranks = [
            [
                *in_rounds.OurOrder(
                    size, 0, own, shuffle=False, batch_size=batch, drop_last=drop
                ).rounds(0, 0)
            ]
            for own in ranks_of(world)
        ]
    kept = size // (batch * world) * batch * world if drop else size
    assert {len(rounds) for rounds in ranks} == {-(-kept // (batch * world))}
    for number, together in enumerate(zip(*ranks, strict=True)):
        assert all(share.real or share.items == [0] for share in together)
        first = number * batch * world
        drawn = sorted(place for share in together if share.real for place in share.items)
        assert drawn == list(range(first, min(first + batch * world, kept)))
