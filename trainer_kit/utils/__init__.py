"""Shared utilities: trees of tensors, logs, locks and warnings."""
