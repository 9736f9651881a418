"""The protocol of the lock server: tokens, key names, scripts and their replies. No connections, no threads."""
