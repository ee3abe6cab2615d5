"""Steps and losses in the words of training programs."""

import itertools
from typing import Any

import pytest

from orchestrator.records.metrics.step_lines import LONGEST_CHARACTERS, StepReader
from tests.records.metrics.trainer_lines import TRAINERS, Trainer


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_step_reader_reads_every_trainers_log(trainer: Trainer) -> None:
    reader, loss, val_loss = StepReader(), {}, {}
    for line in trainer.lines:
        read = reader.values(line)
        for name, curve in (("loss", loss), ("val_loss", val_loss)):
            if name in read:
                curve.setdefault(read["step"], read[name])
    assert (list(loss.items()), list(val_loss.items())) == (trainer.loss, trainer.val_loss)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("step 12 loss 0.3", {"step": 12, "loss": 0.3}),
        ("step 12/100 | loss 3.21 | lr 1e-4", {"step": 12, "steps": 100, "loss": 3.21, "lr": 1e-4}),
        ("iter 100: loss 2.3045, time 12.3ms, mfu 1.2%", {"step": 100, "loss": 2.3045}),
        (
            "step 250: train loss 2.3, val loss 2.4",
            {"step": 250, "loss": 2.3, "val_loss": 2.4},
        ),
        ("step 250: val loss 2.4", {"step": 250, "val_loss": 2.4}),
        ("step=5 loss=tensor(0.43, grad_fn=<MseLossBackward0>)", {"step": 5, "loss": 0.43}),
        ("step 7 loss nan", {"step": 7, "loss": None}),
        ("global_step: 1234, train/loss: 0.5", {"step": 1234, "loss": 0.5}),
        (  # torchtitan
            "[titan] 2026-11-23 20:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.12"
            "  \x1b[38mgrad_norm:  1.25  \x1b[34mmemory:  1.00GiB(1.2%)  \x1b[36mtps: 1,234",
            {"step": 10, "loss": 7.12, "grad_norm": 1.25, "tokens_per_s": 1234.0},
        ),
        (  # litgpt
            "Epoch 1 | iter 228 step 57 | loss train: 1.223, val: n/a | iter time: 2.98 ms (step)",
            {"step": 57, "loss": 1.223},
        ),
        (  # torchtune
            "1|3|Loss: 7.123:  30%|###       | 3/10 [00:03<00:07,  1.0s/it]",
            {"step": 3, "steps": 10, "loss": 7.123},
        ),
        ("Step 3 | loss:7.1 lr:2e-05 ", {"step": 3, "loss": 7.1, "lr": 2e-5}),
        (  # Megatron
            " iteration       10/     100 | learning rate: 1.0E-04 | lm loss: 6.91E+00 | loss"
            " scale: 1.0 | grad norm: 1.2 |",
            {"step": 10, "steps": 100, "loss": 6.91, "grad_norm": 1.2},
        ),
        (  # Lightning
            "Epoch 2:  50%|##### | 5/10 [00:00<00:00, 20.00it/s, v_num=0, train_loss=0.312]",
            {"step": 25, "loss": 0.312},
        ),
        (
            "Epoch [2/5], Step [100/600], Loss: 2.1",
            {"step": 700, "steps": 3000, "loss": 2.1},
        ),
        ("Epoch: [0][ 10/100]\tLoss 6.9e+00 (7.0e+00)", {"step": 10, "loss": 6.9}),
        ("max_steps: 1000, warmup_steps=10, loss: 0.5", {}),
        ("step time: 12.3 ms, loss 0.5", {}),
        ("step 3 took 0.5 s", {}),
        ("Epoch 3 loss 0.4", {"step": 3, "loss": 0.4}),
        ("best epoch 3 loss 0.4", {}),
    ],
)
def test_step_reader_reads_line(line: str, told: dict[str, Any]) -> None:
    assert StepReader().values(line) == told


@pytest.mark.parametrize(
    ("before", "line", "told"),
    [
        (  # transformers
            "  5%|#         | 10/200 [00:01<00:19, 10.00it/s]",
            "{'loss': '0.345', 'learning_rate': '2e-05', 'epoch': '0.05'}",
            {"step": 10, "steps": 200, "loss": 0.345, "lr": 2e-5},
        ),
        (
            "  5%|#         | 10/200 [00:01<00:19, 10.00it/s]",
            "{'eval_loss': 0.3, 'epoch': 1.0}",
            {"step": 10, "steps": 200, "val_loss": 0.3},
        ),
        (  # composer
            "[batch=10/100]:",
            "\t Train loss/train/total: 2.3026",
            {"step": 10, "steps": 100, "loss": 2.3026},
        ),
        ("Map: 100%|####| 500/500 [00:00<00:00, 20000 examples/s]", "loss 0.3", {}),
    ],
)
def test_loss_on_next_line_belongs_to_step(before: str, line: str, told: dict[str, Any]) -> None:
    place = StepReader()
    assert place.values(before) == {}
    assert place.values(line) == told


def test_epochs_from_zero_give_global_steps() -> None:
    place = StepReader()
    steps = [
        place.values(f"epoch {epoch}/2 batch {batch}/4 loss 1")["step"]
        for epoch in (0, 1)
        for batch in (0, 3)
    ]
    assert steps == [0, 3, 4, 7]


def test_long_line_is_parsed_quickly() -> None:
    """Some patterns would try such a line for ever, in all the ways in which it can be split."""
    parts = ("loss_a", "loss/a", "_a", "a.", " ", "1", "1,", "[ 1/ 2 ", "1%|")
    parts += ("step 1 of ", "epoch(")
    for begin, part in itertools.product(("", "loss", "step ", "epoch", "loss=", "["), parts):
        line = begin + part * (2 * LONGEST_CHARACTERS // len(part)) + "!"
        assert StepReader().values(line).get("steps") is None, (begin, part)
