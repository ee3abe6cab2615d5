"""A process that goes on when the program that started it has ended, and the pipe to it."""
