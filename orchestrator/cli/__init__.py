"""The commands: parse the options, call one function, print its result."""
