"""How many samples a batch is taken for, by which the mean of a loss is weighted."""

from typing import Any

import pytest
import torch

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.models.losses import (
    Losses,
    by_optimizer,
    samples_in,
    to_totals,
)

IMAGE, TARGETS, SCALAR = torch.ones(3, 8, 8), torch.ones(4), torch.tensor(0.5)


@pytest.mark.parametrize(
    ("batch", "drawn", "size"),
    [
        (TARGETS, None, 4),
        ({"id": ["a", "b", "c", "d"], "x": torch.ones(4, 2), "y": TARGETS}, None, 4),
        ((SCALAR, TARGETS), 8, 4),
        (([IMAGE] * 4, TARGETS), 8, 4),
        (([IMAGE] * 4, [TARGETS]), 8, 8),
        (["a"] * 8, 8, 8),
    ],
)
def test_samples_in_counts_batch(batch: Any, drawn: int | None, size: int) -> None:
    assert samples_in(batch, drawn) == size


def test_samples_in_refuses_unequal_tensors() -> None:
    with pytest.raises(UsageError, match="have 3 and 4 rows"):
        samples_in(([IMAGE] * 4, [TARGETS]))
    with pytest.raises(UsageError, match="have no rows"):
        samples_in({"id": ["a", "b"]})


def test_totals_keep_fp64() -> None:
    for given, kept in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        loss = torch.tensor(0.1, dtype=given)
        assert to_totals("the loss", loss, TARGETS, None)["loss"][0].dtype == kept


def test_loss_with_weights_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the loss \(Bilinear\) has weights of its own"):
        Losses(torch.nn.Bilinear(2, 2, 1), None, {})


def test_dict_of_outputs_is_refused_as_loss() -> None:
    """As a model of transformers gives it, whose step forgot `.loss`."""
    with pytest.raises(CheckFailed, match="gave a dict, which is no loss") as refused:
        by_optimizer([""], {"loss": SCALAR, "logits": TARGETS}, TARGETS, 4, [""])
    assert "it has a loss: return that alone" in refused.value.fix
    with pytest.raises(CheckFailed, match="the step gave None: it returns nothing"):
        by_optimizer([""], None, TARGETS, 4, [""])
    assert by_optimizer([""], SCALAR, TARGETS, 4, [""])["loss"][1] == 4
