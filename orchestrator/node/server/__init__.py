"""The node's end of the channel: answers requests and streams files to the head."""
