"""Mutants: mistakes that somebody could make in the package, kept as patches, each with the test that must find it."""
