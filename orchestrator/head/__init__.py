"""Runs on the head node and never imports torch."""
