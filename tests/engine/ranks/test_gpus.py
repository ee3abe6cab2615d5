"""Checks of GPU code that need no GPU; scripts/bench/gpu.py covers the rest."""

import pytest
import torch

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks import ranks


@pytest.mark.parametrize(
    ("visible", "local", "count", "expected"),
    [
        ("0,1", 1, 2, 1),
        ("3", 1, 1, 0),
        ("GPU-1f", 7, 1, 0),
        ("0,1", 2, 2, None),
        (None, 1, 1, None),
    ],
)
def test_device_of_rank_follows_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, local: int, count: int, expected: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    if expected is None:
        with pytest.raises(CheckFailed, match="has no GPU of its own"):
            ranks.device_of_rank()
    else:
        assert ranks.device_of_rank() == torch.device("cuda", expected)
