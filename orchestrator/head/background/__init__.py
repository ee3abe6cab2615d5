"""A process of ours that goes on when whoever started it is gone, and the pipe to it."""
