"""Training on TPUs and other XLA devices."""
