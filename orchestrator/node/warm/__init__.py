"""The standby process, with torch imported, for the next attempt or the next launch."""
