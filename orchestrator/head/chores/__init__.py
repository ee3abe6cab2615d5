"""Everyday work on all nodes of the list: run a command, open a shell, fetch and send files."""
