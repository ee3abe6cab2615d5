"""Interpret measured collectives: name what is slow, predict a training step."""
