"""The measurements behind `orchestrator verify`."""
