"""How it is said: clients and connections, one server or a Cluster, and what becomes of a lost command."""
