"""Checks of the nodes, each alone and with each other."""
