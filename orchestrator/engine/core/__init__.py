"""The training loop: a step, stopping, and saving."""
