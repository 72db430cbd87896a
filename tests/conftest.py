"""Settings for all tests."""

import os

import torch

# Tests train tiny models: more threads only wait for one another, and with several processes for the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
