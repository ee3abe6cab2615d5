"""A running job: its streams, signals, hangs, its end and the cause of a failure."""
