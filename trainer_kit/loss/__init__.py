"""The loss contract: the counts of a batch, and how a model's loss is computed."""
