"""Calls in the ranks of a pool: passed on to each rank, and carried out there."""
