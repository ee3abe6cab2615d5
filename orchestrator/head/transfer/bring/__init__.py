"""Bring what ranks of a job left on some of its nodes to those that lack it, before they go on."""
