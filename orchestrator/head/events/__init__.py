"""Defines the events of a job, a type for each, and runs the commands of --notify."""
