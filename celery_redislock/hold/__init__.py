"""A key that is held: until when its holder may count on it, and the thread that renews it."""
