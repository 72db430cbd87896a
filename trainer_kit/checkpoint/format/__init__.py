"""The files of a checkpoint, without a run."""
