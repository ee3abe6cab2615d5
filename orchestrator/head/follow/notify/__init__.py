"""Runs the commands of --notify when a job ends, fails, is started again or is held up."""
