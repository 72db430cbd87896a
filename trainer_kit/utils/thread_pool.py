"""torch's thread pool in a forked process."""

from __future__ import annotations

import torch


def renew_thread_pool() -> None:
    """Create the thread pool, which a forked process does at first use.

    The autograd engine's threads, one for each device, would create it at the same time. That ends the process with
    "Invalid thread pool" (pytorch#178535).
    """
    torch.set_num_threads(torch.get_num_threads())
