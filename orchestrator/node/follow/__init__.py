"""Follows a job for its head: streams its files, tells its state, ends and removes it."""
