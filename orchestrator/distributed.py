"""Helpers for a script's own training loop: `from orchestrator.distributed import barrier, ...`."""

from orchestrator.engine.ranks.collectives import (
    NodeInfo,
    all_reduce_tensor,
    barrier,
    broadcast_object,
    choose_backend,
    cleanup_distributed,
    gather_tensors,
    get_node_info,
    is_master_node,
    is_master_process,
    setup_distributed,
)

__all__ = ["NodeInfo", "all_reduce_tensor", "barrier", "broadcast_object", "choose_backend"]
__all__ += ["cleanup_distributed", "gather_tensors", "get_node_info"]
__all__ += ["is_master_node", "is_master_process", "setup_distributed"]
