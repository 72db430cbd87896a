"""Dry run: the course of a training, computed before it begins, from the same code."""

from trainer_kit.planning.plan import TrainingPlan
from trainer_kit.planning.planner import PlannedTraining, make_training_plan

__all__ = ["PlannedTraining", "TrainingPlan", "make_training_plan"]
