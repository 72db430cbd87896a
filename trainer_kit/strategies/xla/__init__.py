"""TPUs and other XLA devices."""
