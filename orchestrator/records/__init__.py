"""Experiments and checkpoints on disk."""
