"""Adapters of PEFT: checkpoints in peft's own format, exact resumes, and a base that is written once."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from kit.adapted_training import (  # noqa: E402
    METHODS,
    adapted,
    base,
    peft_warnings_ignored,
    rows,
    save_on_ranks,
    train_on_ranks,
    train_until_killed,
    trainer,
    whole_state,
)
from kit.forked import fork_server  # noqa: E402
from kit.ranks import RankFailed, on_ranks, try_on_ranks  # noqa: E402

from trainer_kit import Accelerator, Callback, Run, load_checkpoint_in_model  # noqa: E402
from trainer_kit.checkpoint import CheckpointError, verify  # noqa: E402
from trainer_kit.cli.main import main  # noqa: E402

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Failed to load:UserWarning"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout:UserWarning"),
]

BATCH = torch.stack([row["input_ids"] for row in rows(4)])


def logits(model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(BATCH).logits  # type: ignore[no-any-return]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_resumes_bit_for_bit_and_peft_loads_its_checkpoint(method: str, tmp_path: Path) -> None:
    process = fork_server().Process(target=train_until_killed, args=(method, str(tmp_path / "killed")))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    resumed, undisturbed = (trainer(adapted(method), tmp_path / name) for name in ("killed", "whole"))
    undisturbed.train()
    resumed.train(resume_from_checkpoint=True)
    model = resumed.run.model
    assert_equal(whole_state(model), whole_state(undisturbed.run.model))
    resumed.save_model(tmp_path / "saved")
    for folder in (tmp_path / "killed" / "checkpoint-6", tmp_path / "saved"):
        assert not (folder / "config.json").exists()
        found = peft.PeftModel.from_pretrained(base(), str(folder))
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=0)
    other = adapted(method, seed=5)  # another base: the run's own comes from its folder
    load_checkpoint_in_model(other, tmp_path / "killed" / "checkpoint-6")
    assert_equal(whole_state(other), whole_state(model))


class Allocates(Callback):
    """Gives AdaLoRA the call that it needs after each step."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def on_optimizer_step(self, run: Run) -> None:
        run.model.base_model.update_and_allocate(run.state.step)  # type: ignore[union-attr, operator]

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.last:
            run.requests.save = run.requests.stop = True


def adapted_by_adalora() -> torch.nn.Module:
    torch.manual_seed(1)
    config = peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=4, target_r=2, tinit=2, tfinal=2, total_step=8, target_modules=["q_proj"]
    )
    with peft_warnings_ignored():
        return peft.get_peft_model(base(), config)  # type: ignore[no-any-return]


def test_adalora_trains_as_in_the_loop_of_peft(tmp_path: Path) -> None:
    ours, theirs = adapted_by_adalora().double(), adapted_by_adalora().double()
    trainer(
        ours, tmp_path, [Allocates()], max_steps=8, shuffle=False, lr_scheduler_type="constant", max_grad_norm=0.0,
        optim="sgd", per_device_train_batch_size=2, gradient_accumulation_steps=1, learning_rate=0.1,
    ).train()  # fmt: skip
    optimizer = torch.optim.SGD([each for each in theirs.parameters() if each.requires_grad], lr=0.1)
    data = [row["input_ids"] for row in rows(16)]
    for step in range(8):
        batch = torch.stack(data[2 * step : 2 * step + 2])
        theirs(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        theirs.base_model.update_and_allocate(step)  # type: ignore[union-attr, operator]
        optimizer.zero_grad()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("step", [2, 5, 7])
def test_the_rank_allocator_of_adalora_goes_on(step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first ranks are masked, while they become fewer, and once they stay."""

    def train(name: str, last: int = 0) -> torch.nn.Module:
        model = adapted_by_adalora()
        made = trainer(model, tmp_path / name, [Allocates(last)], max_steps=8, save_steps=8, log_level="info")
        made.train(resume_from_checkpoint=True)
        return model

    expected = train("whole")
    train("stopped", step)
    found = train("stopped")
    assert_equal(whole_state(found), whole_state(expected))
    ranks = [model.peft_config["default"].rank_pattern for model in (found, expected)]  # type: ignore[union-attr, index]
    assert ranks[0] == ranks[1]
    assert any(False in each for each in ranks[0].values())
    assert "training changes attributes" not in caplog.text


def test_checkpoints_hold_adapters_alone_and_the_base_is_written_once(tmp_path: Path) -> None:
    trainer(adapted("lora"), tmp_path).train()
    kept = [*tmp_path.glob("base-*")]
    assert len(kept) == 1
    size = sum(each.numel() for each in base().state_dict().values()) * 4
    assert (kept[0] / "model.safetensors").stat().st_size >= size
    for checkpoint in tmp_path.glob("checkpoint-*"):
        assert not [*checkpoint.glob("model*")]
        assert (checkpoint / "adapter_model.safetensors").stat().st_size < size / 4
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert main(["checkpoints", "diff", str(tmp_path / "checkpoint-4"), str(tmp_path / "checkpoint-4")]) == 0
    assert main(["checkpoints", "prune", "--keep", "1", str(tmp_path)]) == 0
    assert kept[0].is_dir()
    trainer(adapted("lora"), tmp_path, max_steps=8).train(resume_from_checkpoint=True)
    assert [*tmp_path.glob("base-*")] == kept


def test_a_checkpoint_without_its_base_says_what_is_missing(tmp_path: Path) -> None:
    trainer(adapted("lora"), tmp_path / "run", max_steps=2).train()
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "elsewhere" / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"lacks the frozen weights .* base-[0-9a-f]{16} of its run; put that"):
        verify(tmp_path / "elsewhere" / "checkpoint-2")
    with pytest.raises(CheckpointError, match="lacks the frozen weights"):
        load_checkpoint_in_model(adapted("lora", seed=5), tmp_path / "elsewhere" / "checkpoint-2")
    load_checkpoint_in_model(adapted("lora"), tmp_path / "elsewhere" / "checkpoint-2")  # it has the same base
    (kept,) = (tmp_path / "run").glob("base-*")
    shutil.copytree(kept, tmp_path / "elsewhere" / kept.name)
    verify(tmp_path / "elsewhere" / "checkpoint-2")
    weights = tmp_path / "elsewhere" / kept.name / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"the frozen weights of checkpoint-2 cannot be read: .* is damaged"):
        verify(tmp_path / "elsewhere" / "checkpoint-2")
    assert main(["checkpoints", "verify", str(tmp_path / "elsewhere")]) == 1


def from_folder(folder: Path, **options: Any) -> Any:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **options)
    torch.manual_seed(1)
    return peft.get_peft_model(model, METHODS["lora"]())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_in_a_folder_is_kept_since_the_folder_may_change(dtype: torch.dtype, tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    first = trainer(from_folder(tmp_path / "base", dtype=dtype), tmp_path / "run")
    first.train()
    assert len([*(tmp_path / "run").glob("base-*")]) == 1
    second = trainer(from_folder(tmp_path / "base", dtype=dtype), tmp_path / "run")
    second.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")
    assert_equal(whole_state(second.run.model), whole_state(first.run.model))
    first.save_model(tmp_path / "base")
    assert {"config.json", "model.safetensors.index.json"} <= {path.name for path in (tmp_path / "base").iterdir()}
    shutil.rmtree(tmp_path / "base")
    base(seed=5).save_pretrained(tmp_path / "base")
    third = trainer(from_folder(tmp_path / "base", dtype=dtype), tmp_path / "run")
    third.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")
    assert_equal(whole_state(third.run.model), whole_state(first.run.model))


def test_a_base_in_the_cache_of_the_hub_is_referred_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    base().save_pretrained(tmp_path / "snapshot")
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache",
        lambda name, file, revision: str(tmp_path / "snapshot" / file) if name == "someone/llama" else None,
    )  # fmt: skip
    model = from_folder(tmp_path / "snapshot")
    model.get_base_model().name_or_path = "someone/llama"
    trainer(model, tmp_path / "run", max_steps=2).train()
    assert not [*(tmp_path / "run").glob("base-*")]
    config = json.loads((tmp_path / "run" / "checkpoint-2" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/llama"


def test_weights_that_the_named_folder_lacks_are_kept(tmp_path: Path) -> None:
    """A new head, and what a script changed after loading."""
    base().save_pretrained(tmp_path / "base")

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
        model.config.pad_token_id = 0
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    def trained(seed: int) -> Any:
        run = trainer(make(seed), tmp_path / "run")
        run.run.train_dataset = [{**row, "labels": torch.tensor(index % 2)} for index, row in enumerate(rows())]
        return run

    first = trained(5)
    first.train()
    content = json.loads((tmp_path / "run" / "checkpoint-2" / "state" / "frozen-base.json").read_text())
    assert "base_model.model.score.weight" in content["kept"]
    second = trained(6)
    second.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")
    assert_equal(whole_state(second.run.model), whole_state(first.run.model))


def test_frozen_weights_that_change_and_buffers_are_saved(tmp_path: Path) -> None:
    from trainer_kit import Callback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 48)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.last(self.norm(self.first(input_ids.float())))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 0]), "logits": logits}

    class Changing(Callback):
        def on_step_end(self, run: Run) -> None:
            model: Any = run.model
            if run.state.step == 2:
                with torch.no_grad():
                    model.base_model.model.last.bias.add_(1)
            if run.state.step == 3:
                model.base_model.model.norm.weight.requires_grad_(True)

    def make() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["first"]))

    first = trainer(make(), tmp_path, [Changing()])
    first.train()
    other = make()
    load_checkpoint_in_model(other, tmp_path / "checkpoint-6")
    assert_equal(whole_state(other), whole_state(first.run.model))
    changed = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "last.bias", "norm.weight"}
    from safetensors import safe_open

    with safe_open(tmp_path / "checkpoint-6" / "model.safetensors", "pt") as file:
        assert {name.removeprefix("base_model.model.") for name in file.keys()} == changed  # noqa: SIM118
    with LoggedWarnings() as logged:
        first.save_model(tmp_path / "saved")
    assert "norm.running_mean" in logged.text
    assert "modules_to_save" in logged.text
    again = make()
    load_checkpoint_in_model(again, tmp_path / "saved", strict=True)
    assert torch.equal(again.state_dict()["base_model.model.norm.running_mean"],
                       first.run.model.state_dict()["base_model.model.norm.running_mean"])  # fmt: skip


class LoggedWarnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()

    def __enter__(self) -> LoggedWarnings:
        logging.getLogger("trainer_kit").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("trainer_kit").removeHandler(self)


def test_several_adapters_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    model = adapted("lora")
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "second" in name:
                each.normal_()
    trainer(model, tmp_path, max_steps=2).train()
    folder = tmp_path / "checkpoint-2"
    found = peft.PeftModel.from_pretrained(base(), str(folder))
    found.load_adapter(str(folder / "second"), "second")
    for name in ("default", "second"):
        model.set_adapter(name)
        found.set_adapter(name)
        assert torch.equal(logits(found), logits(model))
    with pytest.raises(ValueError, match=r"not in the model: .*second"):
        load_checkpoint_in_model(adapted("lora"), folder)


def test_an_adapter_with_other_targets_is_refused(tmp_path: Path) -> None:
    trainer(adapted("lora"), tmp_path, max_steps=2).train()
    fewer = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"holds the weights of another model .*not in the model: .*v_proj"):
        load_checkpoint_in_model(fewer, tmp_path / "checkpoint-2")


def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    run = trainer(
        adapted("lora"), tmp_path, eval_dataset=rows(8), load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=True, eval_strategy="steps", eval_steps=2, save_total_limit=1,
    )  # fmt: skip
    run.train()
    best = adapted("lora")
    load_checkpoint_in_model(best, tmp_path / f"checkpoint-{run.run.state.best_step}")
    assert run.run.state.best_step == 2
    assert_equal(whole_state(run.run.model), whole_state(best))


def test_a_transformers_model_with_an_adapter_of_its_own(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")

    def make() -> Any:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="mine")
        return model

    first, second = (trainer(make(), tmp_path / "run") for _ in range(2))
    first.train()
    second.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-4")
    assert_equal(whole_state(second.run.model), whole_state(first.run.model))
    folder = tmp_path / "run" / "checkpoint-6"
    for loaded in (
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        peft.PeftModel.from_pretrained(base(), str(folder)),
    ):
        assert torch.equal(logits(loaded), logits(first.run.model))


def test_the_accelerator_writes_adapters_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(adapted("lora"))
    accelerator.save_model(model, tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base(), str(tmp_path))), logits(model))


def test_merging_takes_two_lines(tmp_path: Path) -> None:
    run = trainer(adapted("lora"), tmp_path, max_steps=2)
    run.train()
    expected = logits(run.run.model)
    run.run.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", ["dora", "modules to save", "embedding and biases"])
def test_processes_write_and_resume_adapters(tmp_path: Path, method: str, strategy: str) -> None:
    whole, _ = on_ranks(2, train_on_ranks, method, str(tmp_path / "run"), strategy)
    resumed, _ = on_ranks(
        2, train_on_ranks, method, str(tmp_path / "other"), strategy, str(tmp_path / "run" / "checkpoint-2")
    )
    assert_equal(resumed, whole)
    assert len([*(tmp_path / "run").glob("base-*")]) == 1
    other = adapted(method, seed=5)
    load_checkpoint_in_model(other, tmp_path / "run" / "checkpoint-6")
    assert_equal(whole_state(other), whole)
    found = peft.PeftModel.from_pretrained(base(), str(tmp_path / "run" / "checkpoint-6"))
    assert torch.equal(logits(found), logits(other))


@pytest.mark.distributed
def test_computed_tensors_are_refused_where_weights_are_sharded(tmp_path: Path) -> None:
    for each in try_on_ranks(2, train_on_ranks, "prompt", str(tmp_path), "fsdp"):
        assert isinstance(each, RankFailed)
        assert "is of type PROMPT_TUNING, whose file holds computed tensors" in str(each)


@pytest.mark.distributed
def test_sharded_adapters_are_written_for_use(tmp_path: Path) -> None:
    on_ranks(2, save_on_ranks, "lora", str(tmp_path / "run"), str(tmp_path / "saved"))
    models = [peft.PeftModel.from_pretrained(base(), str(tmp_path / name)) for name in ("saved", "run/checkpoint-2")]
    assert torch.equal(logits(models[0]), logits(models[1]))


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_quantized_base_is_referred_to_and_a_run_resumes(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    base().save_pretrained(tmp_path / "base")

    def make() -> Any:
        if package == "torchao":
            from torchao.quantization import Int8WeightOnlyConfig

            config: Any = transformers.TorchAoConfig(Int8WeightOnlyConfig())
        else:
            config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        return from_folder(tmp_path / "base", quantization_config=config, device_map="cpu")

    first, second = (trainer(make(), tmp_path / "run") for _ in range(2))
    first.train()
    assert not [*(tmp_path / "run").glob("base-*")]
    assert not [*(tmp_path / "run" / "checkpoint-2").glob("model*")]
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for found, other in zip(first.run.model.parameters(), second.run.model.parameters(), strict=True):
        assert not found.requires_grad or torch.equal(found, other)
    nameless = make()
    nameless.get_base_model().config._name_or_path = nameless.get_base_model().name_or_path = ""
    nameless.peft_config["default"].base_model_name_or_path = None
    with pytest.raises(ValueError, match="the frozen weights are quantized, and the model does not say"):
        trainer(nameless, tmp_path / "other").train()
