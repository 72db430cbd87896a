"""The file format of checkpoints, independent of a run."""
