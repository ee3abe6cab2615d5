"""Compute from facts what each node of a job will run: pure functions."""
