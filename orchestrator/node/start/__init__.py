"""Starts a node's part of a job, the first time and again."""
