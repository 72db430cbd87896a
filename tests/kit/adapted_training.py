"""A small language model with adapters of PEFT and its training, for tests in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from trainer_kit import Callback, Run, Trainer, TrainingArguments

PEFT_WARNINGS = (".*is_gradient_checkpointing", "Setting `save_embedding_layers`")
LINEAR = ["q_proj", "v_proj"]
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LINEAR, lora_dropout=0.1),
    "dora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LINEAR, use_dora=True),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "projected prefix": lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=4,
        encoder_hidden_size=8,
        encoder_reparameterization_type="LSTM",
        encoder_dropout=0.1,
        encoder_num_layers=2,
    ),
    "adalora": lambda: peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=20, target_modules=LINEAR
    ),
    "modules to save": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, modules_to_save=["lm_head"]),
    "embedding and biases": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], bias="all"),
}


def base(seed: int = 0, attention_bias: bool = True) -> Any:
    """A model without a name: its weights are nowhere else."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            attention_bias=attention_bias,
        )
    )


@contextlib.contextmanager
def peft_warnings_ignored() -> Iterator[None]:
    """Ignore warnings of peft's own, which pytest makes errors on ranks too."""
    with warnings.catch_warnings():
        for message in PEFT_WARNINGS:
            warnings.filterwarnings("ignore", message)
        yield


def adapted(method: str, seed: int = 0) -> Any:
    model = base(seed)
    torch.manual_seed(1)
    with peft_warnings_ignored():
        return peft.get_peft_model(model, METHODS[method]())


def rows(count: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 48, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]


class Killed(Callback):
    """Ends the process in a step, once the checkpoint before it is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            newest = Path(run.args.output_dir) / f"checkpoint-{self.step - 1}" / "manifest.json"
            while not newest.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(
    model: Any, folder: str | Path, callbacks: Sequence[Callback] = (), eval_dataset: Any = None, **options: Any
) -> Trainer:
    given = {"max_steps": 6, "save_steps": 2, "learning_rate": 0.01, "per_device_train_batch_size": 4} | options
    args = TrainingArguments(output_dir=str(folder), report_to=(), **given)
    return Trainer(model, args, rows(), eval_dataset, callbacks=[*callbacks])


def train_until_killed(method: str, folder: str) -> None:
    """Train in this process, which ends in step 5."""
    torch.set_num_threads(1)
    trainer(adapted(method), folder, [Killed(5)]).train()


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a model, gathered. Collective."""
    whole = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in model.state_dict().items()
    }
    return {name: each.detach().clone() for name, each in whole.items()}


def train_on_ranks(method: str, folder: str, strategy: str, resume: str | None = None) -> dict[str, torch.Tensor]:
    run = trainer(adapted(method), folder, strategy=strategy, per_device_train_batch_size=2)
    with peft_warnings_ignored():
        run.train(resume_from_checkpoint=resume)
    return whole_state(run.run.model)


def save_on_ranks(method: str, folder: str, target: str) -> None:
    """Train under FSDP, and write the model."""
    run = trainer(adapted(method), folder, strategy="fsdp", max_steps=2)
    run.train()
    run.save_model(target)
