"""Reads the metrics files of a run: those of its ranks, and those of its nodes' samplers."""
