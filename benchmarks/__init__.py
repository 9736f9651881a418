"""What a cycle and a task cost: `python -m benchmarks`."""
