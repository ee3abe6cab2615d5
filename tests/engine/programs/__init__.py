"""The gallery: what ranks do in the tests of the engine; worlds.py calls these with a directory."""
