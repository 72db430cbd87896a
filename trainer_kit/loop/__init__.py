"""The training loop: steps, evaluation, and what ranks settle between steps."""
