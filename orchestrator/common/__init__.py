"""What every room may use: errors, text, files, folders, and how interrupts are held."""
