"""The worker's main process: what it checks at its start, and how it releases the locks of children that died."""
