"""Live web pages of all experiments: progress, curves, logs, and a stop that asks."""
