"""Which packages and devices there are."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from torch.torch_version import TorchVersion

from trainer_kit.config import environment

_PACKAGES = {
    "is_4bit_bnb_available": "bitsandbytes",
    "is_8bit_bnb_available": "bitsandbytes",
    "is_aim_available": "aim",
    "is_boto3_available": "boto3",
    "is_clearml_available": "clearml",
    "is_comet_ml_available": "comet_ml",
    "is_datasets_available": "datasets",
    "is_dvclive_available": "dvclive",
    "is_lomo_available": "lomo_optim",
    "is_matplotlib_available": "matplotlib",
    "is_mlflow_available": "mlflow",
    "is_pandas_available": "pandas",
    "is_peft_available": "peft",
    "is_pynvml_available": "pynvml",
    "is_pytest_available": "pytest",
    "is_sagemaker_available": "sagemaker",
    "is_schedulefree_available": "schedulefree",
    "is_swanlab_available": "swanlab",
    "is_timm_available": "timm",
    "is_torchao_available": "torchao",
    "is_torchdata_available": "torchdata",
    "is_torchvision_available": "torchvision",
    "is_trackio_available": "trackio",
    "is_transformers_available": "transformers",
    "is_triton_available": "triton",
    "is_wandb_available": "wandb",
}

_NEVER = (
    "is_deepspeed_available", "is_habana_gaudi1", "is_hpu_available", "is_megatron_lm_available", "is_mlu_available",
    "is_msamp_available", "is_musa_available", "is_neuron_available", "is_npu_available", "is_pippy_available",
    "is_sdaa_available", "is_transformer_engine_available", "is_transformer_engine_mxfp8_available",
    "is_xccl_available", "is_xpu_available",
)  # fmt: skip
"""Devices and packages that no strategy of trainer_kit uses."""


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether bfloat16 can be computed on this machine's device."""
    if environment.xla_device_type() is not None:
        return not ignore_tpu
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Return whether float16 can be computed on this machine's device."""
    return True


def is_fp8_available() -> bool:
    """Return whether fp8 can be computed: torchao is installed."""
    return _is_installed("torchao")


def is_cuda_available() -> bool:
    """Return whether torch finds an NVIDIA or AMD GPU."""
    return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Return whether torch is built for AMD's GPUs."""
    return torch.version.hip is not None


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch finds an Apple GPU."""
    return torch.backends.mps.is_available()


def is_tensorboard_available() -> bool:
    """Return whether event files for TensorBoard can be written."""
    return _is_installed("tensorboard")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed, and with `check_is_tpu` finds a TPU."""
    if check_is_gpu or not environment.has_torch_xla():
        return False
    return environment.xla_device_type() == "TPU" if check_is_tpu else True


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata is installed, which has `StatefulDataLoader`."""
    return _is_installed("torchdata")


def is_rich_available() -> bool:
    """Return False: errors and bars are not drawn by rich."""
    return False


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, and at least of a version."""
    if not _is_installed("bitsandbytes"):
        return False
    return min_version is None or TorchVersion(importlib.metadata.version("bitsandbytes")) >= min_version


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy is at least of a version."""
    return TorchVersion(np.__version__) >= min_version


def is_tqdm_available() -> bool:
    """Return True: trainer_kit needs tqdm."""
    return True


def is_torch_distributed_available() -> bool:
    """Return True: several processes need nothing that torch lacks."""
    return True


def _is_available(name: str, package: str | None) -> Callable[[], bool]:
    def is_available() -> bool:
        return package is not None and _is_installed(package)

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = f"Return whether {package} is installed." if package else "Return False."
    return is_available


globals().update({name: _is_available(name, _PACKAGES.get(name)) for name in (*_PACKAGES, *_NEVER)})

__all__ = sorted({*_PACKAGES, *_NEVER, *(name for name in globals() if name.startswith("is_"))})
