"""The command line: who holds what, since when, what waits for it, and why a task has not run. Nothing else imports it."""
