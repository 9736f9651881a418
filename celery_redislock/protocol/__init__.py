"""What is said to the lock server: tokens, the names of keys, scripts and their answers. No connection, no thread."""
