"""A context in which CUDA raises on every call that waits for the GPU."""

from __future__ import annotations

import warnings

import torch


class SyncDebug:
    """The context; it may be entered again and again, and left more often than entered."""

    def __enter__(self) -> None:
        with warnings.catch_warnings():
            # CUDA warns at the first use, once the mode is set: as an error that would leave it on.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
