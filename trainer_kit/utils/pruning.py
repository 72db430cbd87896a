"""Recognition of optuna's pruning, without an import of optuna."""

from __future__ import annotations

import sys


def is_pruned(error: BaseException) -> bool:
    """Return whether an error is optuna's `TrialPruned`, which ends a trial and is no failure."""
    optuna = sys.modules.get("optuna")  # imported already if it raised the error
    return optuna is not None and isinstance(error, optuna.TrialPruned)
