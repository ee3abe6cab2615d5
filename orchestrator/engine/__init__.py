"""Runs in every rank: the built-in training run and the Trainer."""
