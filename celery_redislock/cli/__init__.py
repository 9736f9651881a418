"""The command line: who holds what and since when, what waits, and why a task has not run. Nothing else imports it."""
