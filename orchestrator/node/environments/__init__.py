"""The Python environments on this node: those of `orchestrator bootstrap` and of jobs."""
