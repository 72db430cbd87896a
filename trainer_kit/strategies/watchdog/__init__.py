"""Detection of lost, stopped and slow processes."""
