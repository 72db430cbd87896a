"""Memory of a training step: an estimate on fake tensors, a measurement of a real step, and ways to reduce it."""

from trainer_kit.memory.advice import Estimate, Option, advise
from trainer_kit.memory.anatomy import Anatomy, Component
from trainer_kit.memory.costs import COSTS, Cost
from trainer_kit.memory.estimation import estimate
from trainer_kit.memory.measuring import measure

__all__ = ["COSTS", "Anatomy", "Component", "Cost", "Estimate", "Option", "advise", "estimate", "measure"]
