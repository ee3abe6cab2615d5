"""What the ranks of a job spend their steps on: ask them, read their traces, say what to change."""
