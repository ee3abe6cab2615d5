"""Samples, their order, and how ranks divide them."""
