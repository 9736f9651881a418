"""Chaos: a seeded random run of faults under load, and a checker of what the ledger says afterwards: ``make chaos``."""
