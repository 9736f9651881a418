"""Real servers, real workers and a ledger of what ran, for the tests."""
