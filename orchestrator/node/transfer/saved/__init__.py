"""What a program saved in files of its own: list it, and take copies of what others saved."""
