"""Bring what a program has saved on some nodes alone to the others before they go on."""
