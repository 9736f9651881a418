"""Lives of random apps: random tasks, calls, deploys and faults, and one oracle that knows what the docs promise."""
