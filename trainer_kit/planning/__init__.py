"""Dry run: the course of a training, computed before it begins, from the same code."""

from trainer_kit.planning.plan import TrainingPlan
from trainer_kit.planning.planned_training import PlannedTraining
from trainer_kit.planning.planner import make_training_plan

__all__ = ["PlannedTraining", "TrainingPlan", "make_training_plan"]
