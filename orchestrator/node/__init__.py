"""Runs on every node, outside torch. Standard library only, Python 3.9+, sent over SSH."""
