"""What all parts use: trees of tensors, logs, locks, warnings."""
