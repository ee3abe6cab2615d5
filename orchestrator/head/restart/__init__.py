"""The next attempt of a job that failed: recorded, on its nodes, in the same experiment."""
