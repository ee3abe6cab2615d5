"""What this machine is: read from files at each launch, from tools when examined."""
