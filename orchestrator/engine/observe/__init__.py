"""Metrics, step phases, profiles and trackers of a training."""
