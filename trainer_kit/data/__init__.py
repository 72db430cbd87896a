"""Data: the order of samples, their reading, and batches for the loop."""
