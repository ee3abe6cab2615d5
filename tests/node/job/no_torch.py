"""An empty torch: for what depends on its being there, not on what it does.

The real one takes two seconds to import.
"""

from __future__ import annotations

import types
from typing import Any


def broken_by_a_fork() -> Any:
    """A torch as it is in a process forked from one that had initialised CUDA."""
    torch: Any = types.ModuleType("torch")
    torch._C = types.SimpleNamespace(_cuda_isInBadFork=lambda: True)
    return torch
