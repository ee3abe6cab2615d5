import runpy

import pytest
import torch

from orchestrator import engine
from orchestrator.common.errors import CheckFailed


def test_engine_refuses_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(
        CheckFailed, match=r"the engine needs torch 2\.8 or later, and this is 2\.5\.1"
    ):
        runpy.run_path(str(engine.__file__))
