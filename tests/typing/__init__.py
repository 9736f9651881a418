"""What type checkers see: code as users write it. mypy reads it, nobody runs it."""
