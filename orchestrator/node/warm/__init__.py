"""The process that waits with torch imported, for the next attempt or the next launch."""
