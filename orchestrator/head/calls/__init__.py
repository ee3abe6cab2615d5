"""Calls from a Python program to the ranks of its pool, and the answers on their way back."""
