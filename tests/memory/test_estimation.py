"""Estimates on fake tensors, beside what the allocator counted in a real step."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.sized_models import MODELS, bert, freeze_half, gpt2, perceptron, resnet, without_onednn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_kit import Precision, SingleDevice, TrainingArguments
from trainer_kit.loss.loss import call
from trainer_kit.memory import Anatomy, estimate, measure
from trainer_kit.memory.measuring import peak_on_cpu
from trainer_kit.memory.step import Step
from trainer_kit.optim import make_optimizer

PLAIN: dict[str, Any] = {}
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "accumulation": {"gradient_accumulation_steps": 4},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"mixed_precision": "bf16"},
    "frozen": PLAIN,
}


def arguments(**given: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, **given)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_is_that_of_a_real_step(model: str, way: str) -> None:
    module, batch = MODELS[model]()
    if way == "frozen":
        freeze_half(module)
    args = arguments(**WAYS[way])
    estimated, measured = estimate(module, args, batch), measure(module, args, batch)
    # oneDNN works on copies of its own in bfloat16, which ones hangs on the processor
    assert estimated.peak == pytest.approx(measured.peak, rel=0.1 if way == "bf16" else 0.02)
    for name in ("weights", "buffers", "batch", "optimizer"):
        assert estimated.nbytes(name) == measured.nbytes(name)
    if model != "resnet":  # whose peak may be one of two moments
        for name in ("gradients", "casts", "activations"):
            assert estimated.nbytes(name) == pytest.approx(measured.nbytes(name), rel=0.02)


MOMENTUM = {"optim": "sgd", "optim_args": "momentum=0.9"}


@pytest.mark.parametrize("given", [{"optim": "sgd"}, MOMENTUM, {"optim": "adafactor"}, {"max_grad_norm": 0.0}])
def test_the_optimizer_is_the_real_one(given: dict[str, Any]) -> None:
    module, batch = perceptron(8)  # so that the peak is in the optimizer's step
    estimated, measured = (function(module, arguments(**given), batch) for function in (estimate, measure))
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)
    assert estimated.nbytes("optimizer") == measured.nbytes("optimizer")


def test_muons_state_is_exact_and_its_peak_near() -> None:
    """CPU kernels of matrix products in bfloat16 take buffers that an estimate does not know."""
    module, batch = perceptron(8)
    estimated, measured = (function(module, arguments(optim="muon"), batch) for function in (estimate, measure))
    assert estimated.nbytes("optimizer") == measured.nbytes("optimizer")
    assert estimated.peak == pytest.approx(measured.peak, rel=0.05)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_half_precision_with_its_scaler(model: str, precision: str) -> None:
    """With torch's own kernels, which are the same on all processors."""
    module, batch = MODELS[model]()
    args = arguments(mixed_precision=precision, optim="sgd")
    with without_onednn():
        estimated, measured = estimate(module, args, batch), measure(module, args, batch)
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)


def test_fp16_as_the_processor_computes_it() -> None:
    module, batch = perceptron()
    args = arguments(mixed_precision="fp16", optim="sgd")
    # Where the processor computes in float16, oneDNN works in blocks of its own, which the estimate leaves out.
    bound = 0.1 if torch.ops.mkldnn._is_mkldnn_fp16_supported() else 0.02
    assert estimate(module, args, batch).peak == pytest.approx(measure(module, args, batch).peak, rel=bound)


def test_an_optimizer_of_the_user() -> None:
    module, batch = perceptron(8)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    plain, given = (estimate(module, arguments(optim="sgd"), batch, optimizer=each) for each in (None, optimizer))
    by_name = estimate(module, arguments(optim="sgd", optim_args="momentum=0.9"), batch)
    assert plain.nbytes("optimizer") == 0
    assert by_name.nbytes("optimizer") == given.nbytes("optimizer")
    assert given.nbytes("optimizer") == given.nbytes("weights") == 4 * given.parameters
    assert not optimizer.state
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # now it has a state
    assert estimate(module, arguments(), batch, optimizer=optimizer).peak == given.peak


def test_a_loss_of_the_user() -> None:
    model, batch = nn.Linear(8, 3), (torch.randn(6, 8), torch.randint(0, 3, (6,)))
    weights = torch.ones(3)

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], weights)

    def pair(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    for compute_loss in (mean, pair):
        estimated, measured = (
            function(model, arguments(), batch, compute_loss=compute_loss) for function in (estimate, measure)
        )
        assert estimated.peak == pytest.approx(measured.peak, rel=0.05)
    with pytest.raises(ValueError, match="Linear returned no loss"):
        estimate(model, arguments(), batch[:1])


def test_padding_is_looked_at_as_in_a_real_step() -> None:
    module, batch = gpt2()
    for part in module.modules():
        if isinstance(getattr(part, "attn_dropout", None), nn.Dropout):
            part.attn_dropout.p = 0.0  # with it the CPU computes scores, and masks make no difference
    whole = estimate(module, arguments(), batch)
    batch["attention_mask"][:, -5:] = 0
    padded, measured = (function(module, arguments(), batch) for function in (estimate, measure))
    assert padded.nbytes("activations") == measured.nbytes("activations")
    assert padded.nbytes("activations") > whole.nbytes("activations")  # rows that are full need no mask


class Choosing(nn.Module):
    """Computes what hangs on values: on those of labels, or on those that it computed itself."""

    def __init__(self, by_labels: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.by_labels = by_labels

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x)
        if scores.isnan().any() or scores.mean().item() < -1e9:
            raise FloatingPointError
        chosen = scores[labels != -100] if self.by_labels else scores[scores > 0]
        return {"loss": chosen.square().sum() / int((labels >= 0).sum())}


def test_values_that_are_known_choose() -> None:
    labels = torch.full((64, 50), -100)
    labels[:, 0] = 1
    batch = {"x": torch.randn(64, 50, 8), "labels": labels}
    estimated, measured = (function(Choosing(True), arguments(), batch) for function in (estimate, measure))
    assert estimated.nbytes("activations") == measured.nbytes("activations")
    with pytest.raises(ValueError, match=r"hangs on values that are not known before training .*; measure\(\)"):
        estimate(Choosing(False), arguments(), batch)
    assert measure(Choosing(False), arguments(), batch).peak > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["real", "meta", "trained"])
def test_the_callers_model_stays_as_it_is(kind: str) -> None:
    module, batch = bert()
    module.eval()
    expected = estimate(module, arguments(), batch)
    if kind == "meta":
        with torch.device("meta"):
            module, batch = bert()
        module.eval()
    if kind == "trained":
        module(**batch).loss.backward()
    before, grads = copy.deepcopy(module.state_dict()), [parameter.grad for parameter in module.parameters()]
    generator = torch.get_rng_state()
    estimated = estimate(module, arguments(gradient_checkpointing=True), batch)
    assert estimate(module, arguments(), batch).peak == expected.peak
    assert estimated.nbytes("weights") == sum(each.nbytes for each in module.parameters())  # the tied one once
    assert not module.training
    assert not any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    assert all(one is each.grad for one, each in zip(grads, module.parameters(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    for name, tensor in module.state_dict().items():
        assert tensor.device.type == ("meta" if kind == "meta" else "cpu")
        assert kind == "meta" or torch.equal(tensor, before[name])


def test_what_is_known_of_the_step() -> None:
    module, batch = perceptron(16)
    freeze_half(module)
    found = estimate(module, arguments(gradient_accumulation_steps=2), batch)
    assert found.device == "cpu"
    assert found.parameters == sum(each.numel() for each in module.parameters())
    assert found.trainable == sum(each.numel() for each in module.parameters() if each.requires_grad)
    assert (found.batch_size, found.shape) == (16, {"x": [16, 64], "labels": [16]})
    assert found.peak == sum(component.nbytes for component in found.components)
    assert json.loads(json.dumps(found.to_dict()))["peak"] == found.peak


def test_the_arithmetic_of_a_step() -> None:
    module, batch = perceptron(16)
    forward = 2 * 16 * (64 * 256 + 2 * 256 * 256 + 256 * 10)
    backward = 2 * forward - 2 * 16 * 64 * 256  # the batch needs no gradient
    found = estimate(module, arguments(gradient_accumulation_steps=5), batch)
    assert (found.model_flops, found.recomputed_flops) == (5 * (forward + backward), 0)
    found = estimate(module, arguments(gradient_checkpointing=True), batch)
    assert (found.model_flops, found.recomputed_flops) == (forward + backward, 2 * 2 * 16 * 256 * 256)


class Experts(nn.Module):
    """Each row by one of four experts, in one product of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.experts = nn.Parameter(torch.randn(4, 64, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
        return torch._grouped_mm(self.first(x), self.experts, offs=ends).square().mean()


def test_experts_in_float32() -> None:
    batch = torch.randn(256, 64)
    estimated, measured = (
        function(Experts(), arguments(), batch, compute_loss=call) for function in (estimate, measure)
    )
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)
    assert estimated.model_flops == 3 * 2 * 256 * 64 * 128 + 2 * 2 * 256 * 64 * 64


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].float().mean()


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or torch.__version__ < (2, 13), reason="an older oneDNN takes more"
)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_recurrent_layer(precision: str) -> None:
    if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch gives LSTMs in bfloat16 to oneDNN, which has none for this processor")
    args, batch = arguments(mixed_precision=precision), torch.randn(16, 64, 64)
    estimated, measured = (function(Recurrent(), args, batch, compute_loss=call) for function in (estimate, measure))
    assert estimated.peak == pytest.approx(measured.peak, rel=0.1)


class Talking(nn.Module):
    """Says something each time it computes, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("transformers.models.talking").error("use_cache=True is incompatible")
        return self.linear(x).sum()


def test_models_are_not_heard_and_loggers_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("transformers")
    before = library.level, library.propagate
    library.setLevel("INFO")
    library.propagate = True
    try:
        estimate(Talking(), arguments(), torch.randn(2, 4), compute_loss=call)
        assert not caplog.records
        assert library.level == logging.INFO
        with pytest.raises(ValueError, match="compute_loss returned None"):
            estimate(Talking(), arguments(), torch.randn(2, 4), compute_loss=lambda model, batch: None)
        assert library.level == logging.INFO
        Talking()(torch.randn(2, 4))
        assert caplog.records
    finally:
        library.level, library.propagate = before


@pytest.mark.parametrize(
    ("model", "sentence"),
    [(nn.LazyLinear(3), "lazy module"), (nn.Linear(3, 3).requires_grad_(False), "no parameter that requires")],
)
def test_what_cannot_be_estimated(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        estimate(model, arguments(), torch.randn(2, 3), compute_loss=lambda model, batch: call(model, batch).sum())


def test_a_model_that_needs_numbers_is_told_of_where_it_does() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        result = call(model, batch)
        return result.mean() * float(result.detach().numpy().max())

    model, batch = nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"^the memory of a step cannot be estimated: .*numpy.*test_estimation.py, li"):
        estimate(model, arguments(), batch, compute_loss=loss)
    assert measure(model, arguments(), batch, compute_loss=loss).peak
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"cannot be estimated: TypeError: cannot pickle '_thread.lock' object"):
        estimate(model, arguments(), batch, compute_loss=call)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("samples", [8, 256])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_of_several_processes_lie_in_buckets(accumulation: int, samples: int, tmp_path: Path) -> None:
    module, batch = perceptron(samples)
    args = arguments(gradient_accumulation_steps=accumulation)
    estimated = estimate(module, args, batch, world_size=2)
    with alone(tmp_path):
        measured = measured_with_buckets(module, args, batch)
    assert estimated.peak == pytest.approx(measured, rel=0.01)
    gradients = 4 * estimated.parameters
    assert estimated.nbytes("gradients") == gradients * (1 if accumulation == 1 else 2)  # before the last, beside them


def measured_with_buckets(module: nn.Module, args: TrainingArguments, batch: Any) -> int:
    """The peak of a step in which DistributedDataParallel exchanges gradients."""
    wrapped = DistributedDataParallel(module.train(), gradient_as_bucket_view=True)
    passes = itertools.count(1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        wrapped.require_backward_grad_sync = next(passes) % args.gradient_accumulation_steps == 0  # as no_sync() does
        result: torch.Tensor = wrapped(**batch)["loss"]
        return result

    strategy = SingleDevice("cpu", Precision())
    strategy.setup()
    step = Step(module, make_optimizer(module, args), args, batch, loss, strategy)
    step()
    step()  # in which the buckets are made anew
    buckets = 4 * sum(parameter.numel() for parameter in module.parameters())
    return peak_on_cpu(step) + buckets


@pytest.mark.slow
def test_a_gpu_is_estimated_without_one() -> None:
    module, batch = bert()
    cpu, gpu = (estimate(module, arguments(), batch, device=device) for device in ("cpu", "cuda:0"))
    assert gpu.device == "cuda"
    assert all(component.nbytes % 512 == 0 for component in gpu.components)
    assert gpu.nbytes("runtime") > 300 * 2**20
    assert gpu.in_tensors == gpu.peak - gpu.nbytes("runtime")
    assert gpu.nbytes("batch") >= 2 * cpu.nbytes("batch")  # the next one is copied meanwhile
    assert gpu.nbytes("activations") < cpu.nbytes("activations")  # dropout's masks in bytes
    module, few = perceptron(8)
    cpu, gpu = (estimate(module, arguments(optim="adafactor"), few, device=device) for device in ("cpu", "cuda"))
    assert gpu.nbytes("temporary") == pytest.approx(cpu.nbytes("temporary"), rel=0.01)  # one parameter after the other


@pytest.mark.slow
def test_a_gpu_with_less() -> None:
    module, batch = bert()
    gpu = estimate(module, arguments(), batch, device="cuda")
    half = estimate(module, arguments(mixed_precision="bf16"), batch, device="cuda")
    assert half.nbytes("activations") < gpu.nbytes("activations")
    again = estimate(module, arguments(gradient_checkpointing=True), batch, device="cuda")
    assert again.peak < gpu.peak


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [lambda: perceptron(8192), lambda: bert(128), lambda: resnet(128)])
def test_the_peak_is_that_of_a_real_step_on_a_gpu(make: Callable[[], tuple[nn.Module, Any]], way: str) -> None:
    module, batch = make()
    if way == "frozen":
        freeze_half(module)
    args = TrainingArguments(**WAYS[way])
    estimated = estimate(module, args, batch, device="cuda")
    assert estimated.in_tensors == pytest.approx(measure(module, args, batch, device="cuda").in_tensors, rel=0.1)


LARGE = """
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
from trainer_kit import TrainingArguments
from trainer_kit.memory import estimate

def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

args = TrainingArguments(use_cpu=True, mixed_precision="bf16", gradient_checkpointing=True)
estimate(torch.nn.Linear(2, 2), args.__class__(use_cpu=True), torch.randn(2, 2), compute_loss=lambda m, b: m(b).sum())
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192,
    ))
ids = torch.ones(1, 4096, dtype=torch.long)
before = resident()
found = estimate(model, args, {"input_ids": ids, "labels": ids, "attention_mask": ids}, device="cuda")
print(found.peak, found.parameters, resident() - before)
"""


@pytest.mark.slow
def test_a_large_model_takes_no_memory() -> None:
    """Layers of a model with 70 billion parameters, of which it has 80 (they take as little memory, and 10 seconds)."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    peak, parameters, kibibytes = map(int, done.stdout.split())
    assert parameters > 5e9
    assert peak > 16 * parameters
    assert kibibytes < 200 * 1024


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_of_inference_is_that_of_a_real_pass(model: str, precision: str) -> None:
    module, batch = MODELS[model]()
    args = arguments(mixed_precision=precision)
    with without_onednn():
        estimated, measured = (function(module, args, batch, inference=True) for function in (estimate, measure))
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)
    assert estimated.peak < estimate(module, args, batch).peak
    assert {"gradients", "optimizer", "activations"}.isdisjoint(component.name for component in estimated.components)
    assert estimated.nbytes("weights") == measured.nbytes("weights") == 4 * estimated.parameters
    assert "of a forward pass with batches of" in estimated.table(measured)
    assert module.training


def test_inference_needs_neither_a_loss_nor_something_to_train() -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    found = estimate(model, arguments(), torch.randn(4, 8), inference=True)
    assert found.peak == 4 * (8 * 8 + 8) + 2 * 4 * 4 * 8
    assert found.model_flops == 2 * 4 * 8 * 8


def repeated(setting: Any) -> tuple[Anatomy, Anatomy]:
    """The estimate and the measurement of a GPT-2 with 4 blocks and 512 tokens."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_head=2, n_embd=64, vocab_size=100, n_positions=128, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    model, ids = GPT2LMHeadModel(config), torch.randint(0, 100, (4, 128))
    batch, args = {"input_ids": ids, "labels": ids}, arguments(gradient_checkpointing=setting)
    return estimate(model, args, batch), measure(model, args, batch)


def test_each_policy_of_checkpointing_keeps_what_it_says() -> None:
    tokens, width = 4 * 128, 64
    settings: list[Any] = [False, {"policy": "save_matmuls"}, {"every": 2}, True]
    found = [repeated(setting) for setting in settings]
    for estimated, measured in found:
        assert estimated.peak == pytest.approx(measured.peak, rel=0.01)
        assert estimated.nbytes("activations") == measured.nbytes("activations")
    without, selective, second, everything = (estimated for estimated, _ in found)
    assert without.peak > second.peak > everything.peak
    assert without.peak > selective.peak > everything.peak
    # At the peak, the last block is computed again. The three before it keep the results of four products (3, 1, 4 and
    # 1 times the width), and of the attention, with a number for each row and head.
    kept = 3 * 4 * tokens * (9 * width + width + 2)
    assert selective.nbytes("activations") - everything.nbytes("activations") == pytest.approx(kept, rel=0.2)
    # Three of the four products and an attention over 128 tokens; the backward pass does not need the last result.
    block = tokens * (2 * 8 * width**2 + 4 * 128 * width)
    again = [each.recomputed_flops - without.recomputed_flops for each in (selective, second, everything)]
    assert again == [0, 2 * block, 4 * block]
