"""The work of the commands that take an earlier experiment up again."""
