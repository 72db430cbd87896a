from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from kit.boxes import Reads, rows, rows_of
from kit.resized import Remembering

from trainer_kit.checkpoint import (
    CheckpointError,
    load_checkpoint_in_model,
    save_tensors,
    take_snapshot,
    write_checkpoint,
)
from trainer_kit.checkpoint.format import manifest
from trainer_kit.checkpoint.format.export import save_model_folder
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.utils.box import Part


class Tied(torch.nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 8, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def equal(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    theirs = right.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in left.state_dict().items())


@pytest.mark.parametrize("size", ["5GB", 64, 1])
def test_a_model_comes_back_and_stays_tied(tmp_path: Path, size: int | str) -> None:
    model, other = Tied(), Tied()
    model.get_buffer("body.1.running_mean").fill_(3)
    model.get_buffer("body.1.num_batches_tracked").fill_(7)
    save_tensors(model.state_dict(), tmp_path, max_shard_size=size)
    parameters = list(other.parameters())
    load_checkpoint_in_model(other, tmp_path)
    assert equal(other, model)
    assert other.head.weight is other.embedding.weight
    assert all(new is old for new, old in zip(other.parameters(), parameters, strict=True))


def test_safetensors_own_load_model_reads_a_tied_model(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_tensors(model.state_dict(), tmp_path)
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert equal(other, model)


def test_a_file_of_safetensors_own_save_model_is_read(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    safetensors.torch.save_model(model, str(tmp_path / "weights.safetensors"))
    load_checkpoint_in_model(other, tmp_path / "weights.safetensors")
    assert equal(other, model)


def test_aliases_reach_a_model_that_is_not_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied(tie=False)
    save_tensors(model.state_dict(), tmp_path)
    load_checkpoint_in_model(other, str(tmp_path))
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert torch.equal(other.embedding.weight, model.embedding.weight)


def test_a_tied_name_that_the_file_leaves_out_is_not_missing(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    state = model.state_dict()
    del state["embedding.weight"]
    save_tensors(state, tmp_path)
    load_checkpoint_in_model(other, tmp_path)
    assert equal(other, model)
    with pytest.raises(ValueError, match=r"missing there: 'embedding.weight'$"):
        load_checkpoint_in_model(Tied(tie=False), tmp_path)


def test_weights_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, dtype=torch.float64)
    save_tensors(model.state_dict(), tmp_path)
    load_checkpoint_in_model(other, tmp_path)
    assert other.weight.dtype == torch.float64
    assert torch.equal(other.weight.float(), model.weight)


def test_another_models_weights_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = {f"layer.{index}": torch.ones(2) for index in range(5)}
    save_tensors({**source, "weight": torch.ones(4, 2), "bias": torch.ones(4)}, tmp_path, max_shard_size=16)
    model = torch.nn.Linear(3, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="another model than this Linear") as caught:
        load_checkpoint_in_model(model, tmp_path)
    message = str(caught.value)
    assert "'weight' is of shape [4, 2] there and [4, 3] in the model" in message
    assert "not in the model: 'layer.0', 'layer.1', 'layer.2' and 2 more" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("size", ["5GB", 1])
def test_a_module_gives_its_tensors_the_shapes_of_the_files(tmp_path: Path, size: int | str) -> None:
    model, other = Remembering(), Remembering()
    model.bank.kept = torch.randn(5, 2)
    save_tensors(model.state_dict(), tmp_path, max_shard_size=size)
    load_checkpoint_in_model(other, tmp_path)
    assert equal(other, model)


def test_a_module_that_does_not_resize_its_tensor_says_so(tmp_path: Path) -> None:
    model = Remembering()
    model.linear.register_load_state_dict_pre_hook(lambda *args: None)
    save_tensors(model.state_dict() | {"linear.bias": torch.ones(5)}, tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch for linear\.bias: .* torch\.Size\(\[5\]\)"):
        load_checkpoint_in_model(model, tmp_path)


def test_other_shapes_of_other_modules_are_still_refused(tmp_path: Path) -> None:
    model, before = Remembering(), Remembering()
    changes = {"bank.kept": torch.ones(5, 2), "norm.bias": torch.ones(3), "linear.bias": torch.ones(2)}
    save_tensors(model.state_dict() | changes, tmp_path)
    with pytest.raises(
        ValueError, match=r"of other shape: 'norm\.bias' is of shape \[3\] there and \[2\] in the model$"
    ):
        load_checkpoint_in_model(model, tmp_path)
    assert equal(model, before)


def test_missing_names_are_listed_and_let_pass_without_strict(tmp_path: Path) -> None:
    model = Tied()
    state = {name: torch.full_like(tensor, 5) for name, tensor in model.state_dict().items()}
    del state["body.0.bias"]
    save_tensors({**state, "more": torch.ones(1)}, tmp_path)
    with pytest.raises(ValueError, match=r"missing there: 'body.0.bias'; not in the model: 'more'$"):
        load_checkpoint_in_model(model, tmp_path)
    assert load_weights(model, tmp_path, strict=False, is_verified=False) == ["body.0.bias"]
    load_checkpoint_in_model(model, tmp_path, strict=False)
    assert (model.embedding.weight == 5).all()


def test_another_shape_is_refused_without_strict_too(tmp_path: Path) -> None:
    save_tensors({"weight": torch.ones(4, 2)}, tmp_path)
    with pytest.raises(ValueError, match=r"\[4, 2\] there and \[4, 3\]"):
        load_checkpoint_in_model(torch.nn.Linear(3, 4), tmp_path, strict=False)


def test_a_flipped_bit_in_a_checkpoints_weights_is_found(tmp_path: Path) -> None:
    model = Tied()
    checkpoint = write_checkpoint(tmp_path, take_snapshot(1, model.state_dict(), {}, arguments={}))
    load_checkpoint_in_model(Tied(), checkpoint)
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: its checksum"):
        load_checkpoint_in_model(Tied(), checkpoint)


def test_pickles_and_missing_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickles are never read"):
        load_checkpoint_in_model(Tied(), tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint_in_model(Tied(), tmp_path / "nowhere")


def tiny(kind: str) -> Any:
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
        return transformers.GPT2LMHeadModel(config)
    bert = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=32
    )
    return transformers.BertForMaskedLM(bert)


@pytest.mark.parametrize("size", ["5GB", "1KB"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_transformers_reads_what_is_written_and_the_other_way_round(tmp_path: Path, kind: str, size: str) -> None:
    model = tiny(kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    save_tensors(model.state_dict(), tmp_path / "ours", max_shard_size=size)
    assert (tmp_path / "ours" / "model.safetensors").exists() == (size == "5GB")
    model.config.save_pretrained(tmp_path / "ours")
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert equal(loaded, model)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight

    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    other = tiny(kind)
    load_checkpoint_in_model(other, tmp_path / "theirs")
    assert equal(other, model)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight


def test_the_index_is_the_one_that_transformers_writes(tmp_path: Path) -> None:
    model = tiny("gpt2")
    save_tensors(model.state_dict(), tmp_path / "ours", max_shard_size="1KB")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="1KB")
    ours, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("ours", "theirs")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


def test_weights_are_read_straight_into_the_model_where_they_fit_as_they_are(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_tensors(model.state_dict(), tmp_path, max_shard_size=64)
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *shape, **options: taken.append(1) or empty(*shape, **options))
        load_checkpoint_in_model(other, tmp_path)
    assert equal(other, model)
    assert taken == []
    mixed = Tied()
    mixed.body[0].weight.data = mixed.body[0].weight.data.t()  # not contiguous
    mixed.body[1].double()
    load_checkpoint_in_model(mixed, tmp_path)
    assert all(
        torch.equal(mixed.state_dict()[name].to(value.dtype), value) for name, value in model.state_dict().items()
    )


def test_weights_that_only_the_model_ties_are_those_that_it_loads_last(tmp_path: Path) -> None:
    save_tensors({"z": torch.zeros(3), "a": torch.ones(3)}, tmp_path)  # a comes first in the file
    model = torch.nn.Module()
    model.z = model.a = torch.nn.Parameter(torch.full((3,), 5.0))
    load_checkpoint_in_model(model, tmp_path)
    assert model.z is model.a
    assert model.z.tolist() == [1, 1, 1]


def test_hooks_of_the_model_see_what_is_loaded(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save_tensors(model.state_dict(), tmp_path)
    seen: list[torch.Tensor] = []
    other.register_load_state_dict_pre_hook(lambda _, state, *rest: seen.append(state["weight"].clone()))
    load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(seen[0], model.weight)


def test_what_was_verified_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    checkpoint = write_checkpoint(tmp_path, take_snapshot(1, model.state_dict(), {}, arguments={}))
    hashed: list[str] = []
    checksum = manifest.checksum
    monkeypatch.setattr(manifest, "checksum", lambda path: hashed.append(path.name) or checksum(path))
    other = Tied()
    load_weights(other, checkpoint, is_verified=True)
    assert equal(other, model)
    assert hashed == []
    load_checkpoint_in_model(other, checkpoint)
    assert hashed == ["model.safetensors"]


def test_weights_that_the_manifest_does_not_list_are_not_loaded(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, take_snapshot(1, Tied().state_dict(), {}, arguments={}), max_shard_size=64)
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = min(content["weight_map"].values())
    shutil.copy(checkpoint / shard, checkpoint / "model-foreign.safetensors")
    first = {name: "model-foreign.safetensors" for name, file in content["weight_map"].items() if file == shard}
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], **first}}))
    with pytest.raises(CheckpointError, match=r"names model-foreign\.safetensors, which the manifest does not list"):
        load_weights(Tied(), checkpoint, is_verified=True)


@pytest.mark.slow
def test_a_device_map_moves_the_model(tmp_path: Path) -> None:
    """As scripts of accelerate's users give it; `meta` stands for a device that is not here."""
    accelerate = pytest.importorskip("accelerate")
    source = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    save_model_folder(tmp_path, source.state_dict(), source, None, "10GB", lambda tensor: tensor)
    for one in ({"": torch.device("cpu")}, {"": "cpu"}, "cpu", torch.device("cpu")):
        other, theirs = copy.deepcopy(source), copy.deepcopy(source)
        for model in (other, theirs):
            torch.nn.init.zeros_(model[0].weight)
        load_checkpoint_in_model(other, tmp_path, device_map=one)  # type: ignore[arg-type]
        accelerate.load_checkpoint_in_model(theirs, tmp_path, device_map={"": "cpu"})
        assert all(
            torch.equal(a, b) for a, b in zip(other.state_dict().values(), theirs.state_dict().values(), strict=True)
        )
        assert torch.equal(other[0].weight, source[0].weight)
    model = copy.deepcopy(source)
    load_checkpoint_in_model(model, tmp_path, {"": "cpu", "1": "meta", "2.weight": "cpu", "2": "cpu"})
    assert {name: value.device.type for name, value in model.state_dict().items()} == {
        name: "meta" if name.startswith("1.") else "cpu" for name in source.state_dict()
    }


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"head": "cpu"}, "device_map names 'head', which is no module or parameter of this Sequential"),
        ({"0": "cpu"}, "device_map has no device for '1.weight' of this Sequential; '' stands for the whole model"),
        ({"": "disk"}, "device_map puts '' on 'disk', but weights stay in memory"),
        ("nowhere", "device_map puts '' on 'nowhere', which is no device"),
    ],
)
def test_a_device_map_that_makes_no_sense(device_map: Any, message: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    save_model_folder(tmp_path, model.state_dict(), model, None, "10GB", lambda tensor: tensor)
    before = torch.nn.init.zeros_(model[0].weight).clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        load_checkpoint_in_model(model, tmp_path, device_map)
    assert torch.equal(model[0].weight, before)


class Expanded(torch.nn.Module):
    """Buffers that repeat what lies in memory once: a scalar, a row, a column."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("scalar", torch.full((), start).expand(2, 3))
        self.register_buffer("row", torch.tensor([start, float("nan"), 3.0]).expand(4, 3))
        self.register_buffer("column", torch.tensor([[start], [2.0]]).expand(2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_buffers_are_loaded_and_stay_expanded(tmp_path: Path, dtype: torch.dtype) -> None:
    model, other = Expanded(7.0), Expanded(0.0)
    save_tensors({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, tmp_path)
    places = {name: tensor.data_ptr() for name, tensor in other.named_buffers()}
    load_checkpoint_in_model(other, tmp_path)
    for name, tensor in other.named_buffers():
        assert torch.equal(tensor.nan_to_num(-1), model.get_buffer(name).nan_to_num(-1))
        assert tensor.stride() == model.get_buffer(name).stride()
        assert tensor.data_ptr() == places[name]


def test_values_that_differ_do_not_fit_an_expanded_buffer(tmp_path: Path) -> None:
    model = Expanded(7.0)
    save_tensors(model.state_dict() | {"row": torch.arange(12.0).view(4, 3)}, tmp_path)
    with pytest.raises(ValueError, match=r"'row' repeats one value in memory \(expand\)"):
        load_checkpoint_in_model(model, tmp_path)


@pytest.mark.parametrize("size", ["5GB", 64])
def test_only_the_rows_that_a_process_holds_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | str
) -> None:
    model = Tied()
    model.get_buffer("body.1.num_batches_tracked").fill_(7)
    save_tensors(model.state_dict(), tmp_path, max_shard_size=size)
    for rank in range(3):
        other = Tied()
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        reads = Reads(monkeypatch)
        load_weights(other, tmp_path, is_verified=False, placement=rows_of(rank, 3))
        there, held = model.state_dict(), 0
        for name, tensor in other.state_dict().items():
            if not tensor.ndim:
                assert torch.equal(tensor, there[name])
                held += tensor.nbytes
                continue
            box = rows(tuple(tensor.shape), rank, 3)
            first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
            assert torch.equal(tensor[first:last], there[name][first:last])
            assert torch.equal(tensor[:first], before[name][:first])
            assert torch.equal(tensor[last:], before[name][last:])
            held += 0 if name == "head.weight" else tensor[first:last].nbytes  # tied: read once
        assert reads.nbytes == held
        assert other.head.weight is other.embedding.weight


def test_weights_that_the_files_tie_and_the_model_does_not_get_their_own_rows(tmp_path: Path) -> None:
    model, other = Tied(), Tied(tie=False)
    save_tensors(model.state_dict(), tmp_path)
    parts: dict[int, Part] = {}
    for rank, weight in enumerate((other.embedding.weight, other.head.weight)):
        box = rows((8, 4), rank, 2)
        parts[id(weight)] = (torch.zeros(box.sizes, dtype=torch.float64), box)
    load_weights(other, tmp_path, is_verified=False, placement=lambda tensor: parts.get(id(tensor)))
    assert torch.equal(parts[id(other.embedding.weight)][0].float(), model.head.weight[:4])
    assert torch.equal(parts[id(other.head.weight)][0].float(), model.head.weight[4:])
    assert torch.equal(other.body[0].weight, model.body[0].weight)


def test_parts_of_another_models_weights_are_refused_by_whole_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tensors({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path)
    reads = Reads(monkeypatch)
    with pytest.raises(ValueError, match=r"'weight' is of shape \[2, 3\] there and \[4, 3\] in the model"):
        load_weights(torch.nn.Linear(3, 4), tmp_path, is_verified=False, placement=rows_of(0, 2))
    assert reads.found == []
