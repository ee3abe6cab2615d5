"""Lists what a program saved in files of its own, and takes copies of what others saved."""
