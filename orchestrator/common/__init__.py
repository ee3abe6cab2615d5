"""Serves every room: errors, text, files, folders, and how interrupts are held."""
