"""Reads from its source what a program will need: nothing of it is imported or run.

`program.read` parses the program and the modules of its own that it imports (imports.py says which,
values.py what its paths are, paths.py what it opens); `foreseen.py` compares that with the nodes.
All of it is a guess: what a program computes is not known before it runs.
"""
