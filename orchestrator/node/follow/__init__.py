"""Follows a job for its head: streams its files, reports its state, ends and removes it."""
