"""Hold the GPUs and slots of a job, on all of its nodes or none; wait in the queue for them."""
