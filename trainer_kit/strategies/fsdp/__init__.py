"""Models whose weights, gradients and optimizer state are sharded over processes."""
