"""Names of DeepSpeed, which is not available: a use is refused in a sentence."""

from trainer_kit.accelerator.unavailable import __getattr__ as __getattr__
