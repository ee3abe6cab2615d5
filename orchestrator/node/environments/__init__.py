"""Virtual environments that `orchestrator bootstrap` makes on this node."""
