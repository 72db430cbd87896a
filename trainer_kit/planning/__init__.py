"""A dry run: what a training would do, computed before it begins, from the same code."""

from trainer_kit.planning.make import Subject, make_training_plan
from trainer_kit.planning.plan import TrainingPlan

__all__ = ["Subject", "TrainingPlan", "make_training_plan"]
