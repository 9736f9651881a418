"""Keys: turn the arguments of a call into the name of its lock. Pure."""
