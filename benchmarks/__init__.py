"""What a cycle, a task and a hand-over cost: `python -m benchmarks`."""
