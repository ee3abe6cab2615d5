"""Runs in the processes of the job: torchrun, and the ranks that start from it."""
