"""Before a start: the state that a job resumes from, brought to its nodes from those it left."""
