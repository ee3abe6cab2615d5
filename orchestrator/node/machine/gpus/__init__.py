"""Reads GPUs, for each vendor: what they are, how they are, what they do now."""
