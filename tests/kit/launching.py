"""Ranks that the launcher starts and watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.processes import run_processes


def run(function: Callable[..., Any] | str, *args: Any, count: int = 2, **options: Any) -> dict[int, Any]:
    """Runs a function in forked processes, or a command, with what is said left out."""
    logs, method = options.pop("logs", None), options.pop("start_method", "fork")
    say = options.pop("say", lambda sentence: None)
    config = LaunchConfig(num_processes=count, cpu=True, monitor_interval=0.05, **options)
    return run_processes(config, function, args, start_method=method, logs=logs, say=say)
