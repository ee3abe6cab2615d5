"""A background process that outlives the program that started it, and the pipe to it."""
