"""What measured collectives mean: who is slow, and what a training step will take."""
