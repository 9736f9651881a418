"""The command line: who holds what, since when, who waits, and why a task has not run. Nothing else imports it."""
