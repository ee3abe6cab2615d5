"""Replaces torchrun where a program starts its ranks by itself: one process on each node.

Takes the options that torchrun gets, and is the keeper of that process itself. Imports no torch:
the program may need none.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any


def main() -> None:
    """Run the node's one process, and end with its exit status."""
    *words, keeper = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    node = options["--node-rank"]
    os.environ.update(
        {
            **{"RANK": node, "WORLD_SIZE": options["--nnodes"]},
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": node},
            **{"MASTER_ADDR": options["--master-addr"], "MASTER_PORT": options["--master-port"]},
        }
    )
    # The module is not in sys.modules, where the user's program would see it.
    rank: Any = types.ModuleType("orchestrator_rank")
    rank.__file__ = keeper
    importlib.machinery.SourceFileLoader(rank.__name__, keeper).exec_module(rank)
    rank.Rank().main()


if __name__ == "__main__":
    main()
