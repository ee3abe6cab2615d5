"""Commands on what jobs have left: checkpoints, and whole experiments."""
