"""Run a program many times with other values, or once for one number."""
