"""Keys: a call's arguments to the name of its lock. Pure."""
