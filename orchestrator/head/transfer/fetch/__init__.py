"""Bring home what ranks write on nodes: while a job runs, at its end, and when asked for."""
