"""Training of models whose weights, gradients and optimizer state are sharded over processes."""
