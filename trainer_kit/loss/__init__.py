"""The loss contract: what a batch counts, and how a model's loss is called."""
