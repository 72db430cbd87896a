"""Measures the CPU's peak as it is imported, so that processes forked afterwards need not: it takes 0.2 s of each."""

import torch

from trainer_kit.profiling.peak_flops import measured_peak

torch.set_num_threads(1)
measured_peak(torch.float32)
