"""The variables that a user gives to all ranks: by options and files, and by a shell file."""
