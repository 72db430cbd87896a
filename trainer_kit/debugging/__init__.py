"""What is left after a failure: crash dumps, and where a step became non-finite."""
