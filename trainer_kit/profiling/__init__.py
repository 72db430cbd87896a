"""Profiling: the time ledger, FLOPs of a model, peak FLOP/s of a device."""
