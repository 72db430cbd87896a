"""Where the memory of a training step goes: estimated on fake tensors, measured in a real step; how to need less."""

from trainer_kit.memory.advice import Estimate, Option, advise
from trainer_kit.memory.anatomy import Anatomy, Component
from trainer_kit.memory.costs import COSTS, Cost
from trainer_kit.memory.estimation import estimate
from trainer_kit.memory.measuring import measure

__all__ = ["COSTS", "Anatomy", "Component", "Cost", "Estimate", "Option", "advise", "estimate", "measure"]
