"""Processes that wait for the next job of this node: a supervisor, and torchrun with torch."""
