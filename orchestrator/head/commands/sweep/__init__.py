"""Run a program many times with other values."""
