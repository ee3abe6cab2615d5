"""Checkpoints, resuming, and the weights as one file."""
