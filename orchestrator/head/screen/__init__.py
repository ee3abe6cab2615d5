"""Log files become lines on a terminal."""
