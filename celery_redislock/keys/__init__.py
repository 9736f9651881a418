"""Keys: from the arguments of a call to the name of its lock. Pure."""
