"""Find out what this machine is: from files at each launch, from tools when examined."""
