"""Strategies: devices, precision and collectives of a run."""

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.strategies.single import SingleDevice

__all__ = ["SingleDevice", "Strategy", "choose_strategy"]
