"""Commands on what jobs have left: checkpoints, the times of a start, whole experiments."""
