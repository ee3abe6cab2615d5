"""List what a program has saved in files of its own here, and take copies of what others saved."""
