"""Runs on every node: standard library only, Python 3.9 or newer, sent over the connection."""
