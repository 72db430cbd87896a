"""Tests of XLA need torch_xla, and the torch that goes with it: `scripts/xla-env` makes an environment for them."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # torch_xla looks for other devices otherwise, when it is imported
    import torch_xla  # noqa: F401


def pytest_report_header() -> str | None:
    return None if find_spec("torch_xla") else "torch_xla is not installed: no test of XLA runs; see scripts/xla-env"
