"""The worker's main process: its checks at startup, its waiting messages, and the locks of dead children."""
