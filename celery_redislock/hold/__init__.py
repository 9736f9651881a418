"""A held key: how long its holder may rely on it, and the thread that renews it."""
