"""Debugging aids: crash dumps, and the origin of nonfinite values."""
