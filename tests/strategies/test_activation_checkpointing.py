"""Activation checkpointing by policy and pattern computes what the same training computes without it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.block_training import Blocks, Records, rows, whole_weights
from kit.block_training import arguments as block_arguments
from kit.ranks import on_ranks
from kit.trainer import arguments
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from trainer_kit import DDP, Trainer
from trainer_kit.config.checkpointing_options import CheckpointingOptions
from trainer_kit.strategies.activation_checkpointing import (
    _keep_matmuls,
    checkpoint_modules,
    restore_modules,
    warn_of_unused_checkpointing,
    watching_kept_results,
)
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.device_info import DeviceInfo

ALL = CheckpointingOptions()
SECOND = CheckpointingOptions(every=2)
SELECTIVE = CheckpointingOptions(policy="save_matmuls")
POLICIES = {"all": ALL, "every 2nd": SECOND, "save_matmuls": SELECTIVE}


class Pair(nn.Module):
    """Takes keywords, among them one of `checkpoint`, and returns a tuple with a dict and None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor, debug: bool = False) -> Any:
        self.calls += 1
        assert debug
        y = nn.functional.dropout(torch.tanh(self.linear(x) + shift), 0.3, self.training)
        return y, {"shift": shift * 2}, None


class Net(nn.Module):
    """Blocks with dropout that return tuples, between two layers."""

    def __init__(self, blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Pair(width) for _ in range(blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.first(x)
        shift = x.mean()
        for block in self.blocks:
            x, others, _ = block(x, shift=shift, debug=True)
            shift = others["shift"]
        logits = self.last(x)
        return {"logits": logits} if labels is None else {
            "loss": nn.functional.cross_entropy(logits, labels), "logits": logits,
        }  # fmt: skip


class Spectral(nn.Module):
    """Its forward pass changes buffers on which its weights depend."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        normed = nn.utils.parametrizations.spectral_norm
        self.blocks = nn.Sequential(
            *(nn.Sequential(normed(nn.Linear(8, 8)), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.blocks(x).pow(2).mean()}


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_head=2, n_embd=32, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0, **options
    )
    config.loss_type = "ForCausalLM"
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48, vocab_size=50
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


def resnet() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
    )
    model: nn.Module = transformers.ResNetForImageClassification(config).train()
    return model


def batch(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "net":
        return {"x": torch.randn(6, 4, generator=generator), "labels": torch.arange(6) % 3}
    if kind == "spectral":
        return {"x": torch.randn(6, 8, generator=generator)}
    if kind == "resnet":
        return {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator), "labels": torch.arange(4)}
    ids = torch.randint(0, 50, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net, "spectral": Spectral, "gpt2": gpt2, "gpt2-eager": lambda: gpt2(attn_implementation="eager"),
    "llama": llama, "resnet": resnet,
}  # fmt: skip


def passes(model: nn.Module, kind: str, bf16: bool = False) -> dict[str, torch.Tensor]:
    """Losses, gradients and buffers of two passes, the second of which adds to the gradients."""
    torch.manual_seed(5)
    found = {}
    for number in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch(kind))["loss"]
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    found["drawn"] = torch.rand(1)
    grads = {f"gradient {name}": each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return found | grads | {name: each.clone() for name, each in model.named_buffers()}


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_gradients_and_buffers_have_the_same_bits(kind: str, policy: str, bf16: bool) -> None:
    wanted = passes(MODELS[kind](), kind, bf16)
    model = MODELS[kind]()
    names = [*model.state_dict()]
    checkpoint_modules(model, POLICIES[policy])
    assert replaced(model)
    assert_same_bits(passes(model, kind, bf16), wanted)
    assert [*model.state_dict()] == names


def test_only_the_chosen_blocks_are_called_again_and_only_for_gradients() -> None:
    model = Net()
    checkpoint_modules(model, SECOND)
    model(**batch("net"))["loss"].backward()
    assert [block.calls for block in model.blocks] == [2, 1, 2, 1]
    with torch.no_grad():
        model(**batch("net"))
    assert [block.calls for block in model.blocks] == [3, 2, 3, 2]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (["Pair"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (["blocks.[13]", "last"], ["blocks.1", "blocks.3", "last"]),
        (["blocks.1.linear", "blocks.1"], ["blocks.1"]),
    ],
    ids=str,
)
def test_patterns_choose_the_outermost_modules(patterns: list[str], expected: list[str]) -> None:
    model = Net()
    checkpoint_modules(model, CheckpointingOptions(modules=patterns))
    assert replaced(model) == expected
    checkpoint_modules(model, CheckpointingOptions(modules=patterns, every=2))
    assert replaced(model) == expected[::2]


def test_a_pattern_or_a_model_without_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'layers\.\*' matches no module .* inside Net; .*, such as 'blocks\.0'"):
        checkpoint_modules(Net(), CheckpointingOptions(modules=["layers.*"]))
    with pytest.raises(ValueError, match="finds no block that Linear repeats"):
        checkpoint_modules(nn.Linear(2, 2), ALL)


def test_the_model_is_restored() -> None:
    model = gpt2()
    model.transformer.h[1].forward = own = model.transformer.h[1].forward  # type: ignore[index, union-attr]
    for options in (CheckpointingOptions(modules=["*"]), SELECTIVE, ALL):
        checkpoint_modules(model, options)
    assert len(replaced(model)) == 6  # four blocks, and two models without a cache
    restore_modules(model)
    assert replaced(model) == ["transformer.h.1"]
    assert vars(model.transformer.h[1])["forward"] is own  # type: ignore[index, union-attr]


def test_a_copy_recomputes_with_its_own_weights() -> None:
    model = Net()
    checkpoint_modules(model, ALL)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_bits(passes(copied, "net"), passes(Net(), "net"))
    assert all(block.calls == 0 for block in model.blocks)
    restore_modules(model)
    assert replaced(model) == []
    pickle.dumps(model)


def test_a_backward_pass_may_be_repeated() -> None:
    wanted, model = resnet(), resnet()
    checkpoint_modules(model, ALL)
    for each in (wanted, model):
        loss = each(**batch("resnet"))["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert_same_bits(dict(model.named_buffers()), dict(wanted.named_buffers()))


class LateBuffer(nn.Module):
    """Changes a buffer from the third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count > 2:
            self.scale.mul_(1.1)
        return torch.tanh(self.layer(x)) * self.scale


def test_a_buffer_that_changes_later_changes_once() -> None:
    found = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(LateBuffer(), LateBuffer())
        if is_checkpointed:
            checkpoint_modules(model, CheckpointingOptions())
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append(dict(model.named_buffers()) | gradients)
    assert_same_bits(found[1], found[0])


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(3):
            x = self.block(x)
        return {"loss": x.float().pow(2).mean()}


@pytest.mark.parametrize("policy", ["all", "save_matmuls"])
def test_a_module_may_be_called_several_times(policy: str) -> None:
    """autocast keeps its cast of the weight from the first call."""
    for bf16 in (False, True):
        model = Shared()
        checkpoint_modules(model, CheckpointingOptions(modules=["block"], policy=policy))  # type: ignore[arg-type]
        found, wanted = passes(model, "spectral", bf16), passes(Shared(), "spectral", bf16)
        if bf16 and policy == "save_matmuls":  # its casts are separate, so that gradients add up in float32
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-4)
        else:
            assert_same_bits(found, wanted)


class Kept(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operators of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def test_results_of_matrix_products_are_kept() -> None:
    counts = {}
    for policy, options in {"none": None, **POLICIES}.items():
        model, counter, kept = gpt2(attn_pdrop=0.0), Kept(), list[Any]()
        if options is not None:
            checkpoint_modules(model, options)
        with counter, watching_kept_results(kept.append):
            model(**batch("gpt2"))["loss"].backward()
        counts[policy] = counter.counts
        assert len(kept) == (5 * 4 if policy == "save_matmuls" else 0)  # 4 layers: 4 products and an attention
    product, attention = "aten.addmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert [counts[policy][product] for policy in counts] == [16, 32, 24, 16]
    assert [counts[policy][attention] for policy in counts] == [4, 8, 6, 4]
    tanh = "aten.tanh.default"
    assert [counts[policy][tanh] for policy in counts] == [4, 8, 6, 8]


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def test_a_pass_that_raises_leaves_no_mode_behind() -> None:
    model, before = Blocks(), torch.is_autocast_cache_enabled()
    checkpoint_modules(model, CheckpointingOptions(policy="save_matmuls"))
    model.blocks[1].down = Raises()
    with Kept(), pytest.raises(ValueError, match="no") as raised:
        model(torch.ones(2, 4).double())
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.is_autocast_cache_enabled() is before
    del raised  # torch 2.9 ends its generator here
    assert torch._C._len_torch_dispatch_stack() == 0


def test_attention_with_dropout_is_computed_again() -> None:
    """Its random numbers would be left out of a recomputation, and later dropout would differ."""
    x = torch.zeros(1, 1, 2, 2)
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert _keep_matmuls(None, attention, x, x, x, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert _keep_matmuls(None, attention, x, x, x, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert _keep_matmuls(None, attention, x, x, x) is CheckpointPolicy.MUST_SAVE
    assert _keep_matmuls(None, attention, x, x, x, 0.0, True) is CheckpointPolicy.MUST_SAVE


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.blocks(x).mean()}


def test_a_kept_result_that_is_changed_in_place_is_refused() -> None:
    model = InPlace()
    checkpoint_modules(model, SELECTIVE)
    with pytest.raises(ValueError, match=r"a Sequential changes in place, such as by ReLU\(inplace=True\)"):
        model(torch.randn(2, 3, 4, 4))["loss"].backward()


def is_checkpointed(model: Any) -> bool:
    """Whether a transformers model does it itself; the attribute has another name before transformers 5.21."""
    name = "is_activation_checkpointing"
    return bool(getattr(model, name if hasattr(model, name) else "is_gradient_checkpointing"))


def test_a_models_own_method_is_used_without_options_alone() -> None:
    model: Any = gpt2()
    Strategy().enable_activation_checkpointing(model)
    assert (is_checkpointed(model), replaced(model)) == (True, [])
    Strategy().enable_activation_checkpointing(model, SELECTIVE)
    assert (is_checkpointed(model), len(replaced(model))) == (False, 6)


def conformer() -> nn.Module:
    """A model with batch norms in the layers that its own method recomputes."""
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        num_labels=4, mask_time_prob=0.0, layerdrop=0.0, classifier_proj_size=8,
    )  # fmt: skip
    return transformers.Wav2Vec2ConformerForSequenceClassification(config).train()


def test_a_models_own_method_counts_each_batch_once() -> None:
    torch.manual_seed(0)
    plain = conformer()
    own = copy.deepcopy(plain)
    Strategy().enable_activation_checkpointing(own)
    batch = {"input_values": torch.randn(4, 400), "labels": torch.arange(4)}
    for model in (plain, own):
        for step in range(5):
            torch.manual_seed(step)
            model(**batch)["loss"].backward()
    torch.testing.assert_close(own.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for parameter, expected in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=0)
    copy.deepcopy(own)(**batch)["loss"].backward()
    restore_modules(own)
    assert not any("recomputation" in name for module in own.modules() for name in vars(module))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_passes_use_cache_by_position(policy: str) -> None:
    config = transformers.CpmAntConfig(
        vocab_size=16, hidden_size=8, num_attention_heads=2, dim_head=4, dim_ff=8, num_hidden_layers=2, dropout_p=0.0
    )
    torch.manual_seed(0)
    plain = transformers.CpmAntForCausalLM(config).double().train()
    checkpointed = copy.deepcopy(plain)
    checkpoint_modules(checkpointed, POLICIES[policy])
    ids = torch.tensor([[3, 4, 5, 6]])
    for model in (plain, checkpointed):
        model(input_ids=ids, labels=ids).loss.backward()
    for parameter, expected in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


class Unsupported(transformers.PreTrainedModel):
    """A transformers model without gradient checkpointing."""

    supports_gradient_checkpointing = False

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        super().__init__(config)
        self.net = Net()
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.net(x, labels)


def test_a_transformers_model_without_support_recomputes_its_blocks() -> None:
    model = Unsupported(transformers.PretrainedConfig())
    Strategy().enable_activation_checkpointing(model)
    assert replaced(model) == [f"net.blocks.{number}" for number in range(4)]


# Trainings


def points(count: int = 20) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(number % 3)} for number in range(count)]


def train(folder: Path, setting: Any, resume: bool = False, **options: Any) -> dict[str, Any]:
    options = {"max_steps": 6, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, **options}
    model, records = Net(), Records()
    args = arguments(folder, gradient_checkpointing=setting, logging_steps=1, learning_rate=0.01, **options)
    Trainer(model, args, points(), points(6), callbacks=[records]).train(resume_from_checkpoint=resume)
    assert replaced(model) == []
    losses = [(record.get("loss"), record.get("grad_norm")) for record in records.seen]
    return {"losses": losses, "eval": [each["eval_loss"] for each in records.evaluated], "weights": model.state_dict()}


@pytest.mark.parametrize(
    "setting", [True, {}, {"every": 2}, {"policy": "save_matmuls"}, {"modules": ["Pair"]}], ids=str
)
def test_a_training_has_the_same_bits(tmp_path: Path, setting: Any) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2}
    theirs, ours = train(tmp_path / "a", False, **options), train(tmp_path / "b", setting, **options)
    assert ours["losses"] == theirs["losses"]
    assert ours["eval"] == theirs["eval"]
    assert len(ours["eval"]) == 3
    assert_same_bits(ours["weights"], theirs["weights"])


@pytest.mark.parametrize(("first", "second"), [(False, {"policy": "save_matmuls"}), ({"every": 2}, False)], ids=str)
def test_a_run_resumes_with_and_without_it(tmp_path: Path, first: Any, second: Any) -> None:
    whole = train(tmp_path / "whole", False)
    saves = {"save_strategy": "steps", "save_steps": 3}
    train(tmp_path / "parts", first, max_steps=3, lr_scheduler_type="constant", **saves)
    resumed = train(tmp_path / "parts", second, resume=True, lr_scheduler_type="constant", **saves)
    whole = train(tmp_path / "whole", False, lr_scheduler_type="constant")
    assert resumed["losses"][:3] == whole["losses"][3:6]
    assert_same_bits(resumed["weights"], whole["weights"])


class Bypassing(Blocks):
    """Calls parts of its blocks, and nothing with gradients where `frozen`."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.frozen = frozen

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embedding(x)
        for block in self.blocks:
            with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
                x = block(x) if self.frozen else block.down(block.up(x))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("frozen", [False, True])
def test_blocks_that_nothing_calls_with_gradients_are_a_warning(
    tmp_path: Path, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceInfo, "compilations", lambda self: (0, 0.0))  # those of other tests count too
    trainer = Trainer(Bypassing(frozen), block_arguments(str(tmp_path), "auto", gradient_checkpointing=True), rows(8))
    with pytest.warns(UserWarning, match="no effect: the first step did not call Block with gradients; name"):
        trainer.train()
    named = block_arguments(str(tmp_path), "auto", gradient_checkpointing={"modules": ["blocks.*.up", "head"]})
    Trainer(Bypassing(frozen), named, rows(8)).train()


def test_layers_of_transformers_that_nothing_calls_are_a_warning() -> None:
    model = gpt2()
    Strategy().enable_activation_checkpointing(model)
    with pytest.warns(
        UserWarning, match="no effect: the first step did not call what is to be recomputed with gradients"
    ):
        warn_of_unused_checkpointing(model)
    model(**batch("gpt2"))
    warn_of_unused_checkpointing(model)


def test_what_compiled_code_calls_is_not_known(tmp_path: Path) -> None:
    compiled = torch.compile(Blocks(), backend="eager")
    args = block_arguments(str(tmp_path), "auto", gradient_checkpointing=True)
    Trainer(compiled._orig_mod, args, rows(8), compute_loss=lambda model, batch: compiled(**batch)).train()


def train_on_ranks(folder: str, strategy: str, setting: Any, options: dict[str, Any], ddp: dict[str, Any]) -> Any:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch.manual_seed(0)
    torch.compiler.reset()
    model, records = Blocks(options.pop("width", 6)), Records()
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: nn.functional.dropout(output, 0.2, module.training))
    args = block_arguments(folder, strategy, gradient_checkpointing=setting, **options)
    given = {"strategy": DDP(**ddp)} if ddp else {}
    trainer = Trainer(model, args, rows(13), rows(5), callbacks=[records], **given)
    trainer.train()
    return {
        "losses": [(record.get("loss"), record.get("grad_norm")) for record in records.seen],
        "weights": whole_weights(model), "eval_loss": trainer.evaluate()["eval_loss"], "replaced": replaced(model),
    }  # fmt: skip


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp": ("ddp", {}, {}),
    "ddp unused": ("auto", {}, {"find_unused_parameters": True}),
    "ddp static": ("auto", {}, {"static_graph": True}),
    "ddp compiled": ("auto", {"torch_compile": {"backend": "aot_eager"}, "width": 256}, {"bucket_cap_mb": 1}),
    "ddp blocks compiled": ("ddp", {"torch_compile": {"backend": "aot_eager", "regional": True}}, {}),
    "fsdp": ("fsdp", {}, {}),
    "fsdp blocks compiled": ("fsdp", {"torch_compile": {"backend": "aot_eager", "regional": True}}, {}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_processes_train_as_without_it(tmp_path: Path, case: str) -> None:
    strategy, options, ddp = CASES[case]
    (theirs, _) = on_ranks(2, train_on_ranks, str(tmp_path), strategy, False, options, ddp)
    for setting in (True, {"every": 2, "policy": "save_matmuls"}, {"modules": ["blocks.*.up", "blocks.*.norm"]}):
        for ours in on_ranks(2, train_on_ranks, str(tmp_path), strategy, setting, options, ddp):
            assert ours["losses"] == theirs["losses"]
            assert ours["eval_loss"] == theirs["eval_loss"]
            assert_same_bits(ours["weights"], theirs["weights"])
            assert ours["replaced"] == []
