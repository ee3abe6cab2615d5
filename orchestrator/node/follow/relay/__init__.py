"""Lets a head speak with a node through another one."""
