"""Finds lost, stopped and slow processes."""
