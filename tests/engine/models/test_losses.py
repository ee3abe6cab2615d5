"""How many samples a batch is taken for, by which the mean of a loss is weighted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from orchestrator.common.errors import UsageError
from orchestrator.engine.models.losses import size_of

IMAGE, TARGETS, SCALAR = torch.ones(3, 8, 8), torch.ones(4), torch.tensor(0.5)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (TARGETS, 4),
        ({"id": ["a", "b", "c", "d"], "x": torch.ones(4, 2), "y": TARGETS}, 4),
        ((SCALAR, TARGETS), 4),
        ([SCALAR], 1),
    ],
)
def test_tensors_that_agree_say_how_many_samples_there_are(batch: Any, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size_of(batch) == size


def test_tensors_that_disagree_are_warned_of() -> None:
    """A list of images begins with a colour, what has time first with a time."""
    with pytest.warns(UserWarning, match="3 and 4 rows: it is taken for a batch of 3 samples"):
        assert size_of(([IMAGE] * 4, TARGETS)) == 3
    with pytest.raises(UsageError, match="nobody knows how many samples"):
        size_of({"id": ["a", "b"]})
