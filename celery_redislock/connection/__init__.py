"""How commands reach Redis: clients, connections, a single server or a Cluster, and lost replies."""
