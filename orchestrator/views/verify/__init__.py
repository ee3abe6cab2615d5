"""Interpret measured collectives: name the slow node, link or device."""
