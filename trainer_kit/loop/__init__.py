"""The training loop: steps, evaluation, and the agreement of ranks between steps."""
