"""Drills: what an operator reads when something fails, and how soon. `make drills` prints it for each fault."""
