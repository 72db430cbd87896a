"""Data: the order of samples, reading them, and making batches for the loop."""
