"""Import paramiko without the parts of it that we never use."""

from __future__ import annotations

import sys

# For `Match exec` in its own reader of ssh_config, paramiko imports invoke, and that asyncio, a
# YAML of its own and unittest.mock: 58 of 156 ms until the head is ready. We let `ssh -G` read it.
known = sys.modules.get("invoke")
if known is None:
    sys.modules["invoke"] = None  # type: ignore[assignment]
import paramiko  # noqa: E402

if known is None:
    del sys.modules["invoke"]

__all__ = ["paramiko"]
