"""The Python environments on this node: of `orchestrator bootstrap`, and of a job."""
