"""Slurm's queue, and jobs whose head is a batch script."""
