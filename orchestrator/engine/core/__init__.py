"""The training loop: one step, when to stop, when to save."""
