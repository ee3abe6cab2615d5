"""Request traces from a running job, and sum them up in a table."""
