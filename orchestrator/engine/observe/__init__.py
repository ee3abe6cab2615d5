"""Metrics, phases, profiles, trackers: what a run says and what it costs."""
