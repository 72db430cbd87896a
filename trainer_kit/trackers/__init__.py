"""Experiment trackers by name, and the interface of one's own; `Trainer` and `Accelerator` share them."""

from trainer_kit.trackers.aim import AimTracker
from trainer_kit.trackers.clearml import ClearMLTracker
from trainer_kit.trackers.comet import CometMLTracker
from trainer_kit.trackers.dvclive import DVCLiveTracker
from trainer_kit.trackers.jsonl import JsonLinesTracker
from trainer_kit.trackers.mlflow import MLflowTracker
from trainer_kit.trackers.registry import TRACKERS
from trainer_kit.trackers.swanlab import SwanLabTracker
from trainer_kit.trackers.tensorboard import TensorBoardTracker
from trainer_kit.trackers.tracker import Tracker
from trainer_kit.trackers.trackio import TrackioTracker
from trainer_kit.trackers.wandb import WandBTracker

__all__ = [
    "TRACKERS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "JsonLinesTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "Tracker",
    "TrackioTracker",
    "WandBTracker",
]
