"""Sharding a model over the ranks with FSDP2, or copying it with ddp."""
