"""Which modules are units of a sharded model, and what cannot be sharded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from kit.architectures import ARCHITECTURES, llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_kit.strategies.fsdp.units import Unit, check_units, describe_single_unit, find_units, unit_sizes

LAYERS = ["model.layers.0", "model.layers.1"]
EXPECTED = {
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "llama": LAYERS,
    "llama-tied": LAYERS,
    "qwen3": LAYERS,
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "modernbert": LAYERS,
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "mixtral": LAYERS,
}


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_units_of_the_architectures(name: str, device: str) -> None:
    with torch.device(device):
        model = ARCHITECTURES[name]()
    units = find_units(model)
    assert names(units) == EXPECTED[name]
    assert all(model.get_submodule(unit.name) is unit.module for unit in units)
    check_units(model, units)


@pytest.mark.parametrize(("tied", "expected"), [(False, ["model.embed_tokens", *LAYERS]), (True, LAYERS)])
def test_a_large_embedding_is_a_unit_unless_it_is_tied(tied: bool, expected: list[str]) -> None:
    layer = sum(parameter.nbytes for parameter in llama().get_submodule("model.layers.0").parameters())
    rows = layer // (16 * 4)  # of 16 numbers in float32
    assert names(find_units(llama(vocab_size=rows, tie_word_embeddings=tied))) == LAYERS
    assert names(find_units(llama(vocab_size=rows + 1, tie_word_embeddings=tied))) == expected


def test_children_of_the_outermost_list_of_one_class_are_units() -> None:
    nested = Model(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert names(find_units(nested)) == ["blocks.0", "blocks.1"]
    assert names(find_units(Model(nn.Sequential(Block(), Block()), Block()))) == ["blocks.0.0", "blocks.0.1"]
    assert names(find_units(nn.Sequential(Block(), Block()))) == ["0", "1"]


@pytest.mark.parametrize(
    "model",
    [
        Model(Block()),
        Model(Block(), nn.Linear(4, 4)),
        Model(nn.ReLU(), nn.ReLU()),
        Model(*(nn.ModuleDict({"a": Block()}) for _ in range(2))),  # which have no forward pass
        nn.Linear(4, 4),
    ],
    ids=["one child", "two classes", "no parameters", "no forward pass", "no list"],
)
def test_what_is_no_unit(model: nn.Module) -> None:
    assert find_units(model) == []


def test_a_list_of_lists_has_its_units_in_the_inner_ones() -> None:
    model = Model(*(nn.ModuleList([Block(), Block()]) for _ in range(2)))
    assert names(find_units(model)) == ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]


def test_blocks_that_share_a_parameter_are_no_units() -> None:
    model = Model(Block(), Block(), Block())
    model.get_submodule("blocks.2.inner").weight = model.get_parameter("blocks.0.inner.weight")
    assert names(find_units(model)) == ["blocks.1"]
    model.first.weight = model.get_parameter("blocks.1.inner.weight")
    assert find_units(model) == []
    shared = Model(Block(), Block(), Block())
    shared.get_submodule("blocks.2").inner = shared.get_submodule("blocks.0.inner")  # a module of two blocks
    assert names(find_units(shared)) == ["blocks.1"]


def test_a_block_with_two_names_is_one_unit() -> None:
    model = Model(block := Block(), Block(), block)
    model.last = block
    assert names(find_units(model)) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["LlamaDecoderLayer"], LAYERS),
        (["model.layers.*"], LAYERS),  # not the modules in them, which match too
        (["model.*"], ["model.embed_tokens", *LAYERS, "model.norm"]),
        (["*MLP", "model.layers.1"], ["model.layers.0.mlp", "model.layers.1", "model.layers.1.mlp"]),
        (["lm_head", "*.embed_tokens"], ["model.embed_tokens", "lm_head"]),
        ([], []),
    ],
)
def test_patterns(patterns: list[str], expected: list[str]) -> None:
    assert names(find_units(llama(), patterns)) == expected


@pytest.mark.parametrize("pattern", ["Decoder", "model.layers", "LlamaForCausalLM", "*.act_fn", "llamadecoderlayer"])
def test_a_pattern_that_matches_no_unit_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"units: {pattern!r} matches no module with parameters")) as raised:
        find_units(llama(), ["lm_head", pattern])
    assert "such as 'model.layers.0' (LlamaDecoderLayer)" in str(raised.value)


def test_a_single_string_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("units='Block' must be a list of patterns; use units=['Block']")):
        find_units(Model(Block()), "Block")


@pytest.mark.parametrize(
    ("name", "patterns", "places"),
    [
        ("gpt2", ["*.wte"], ("'transformer.wte.weight' in unit 'transformer.wte'", "'lm_head.weight' in the root")),
        ("llama-tied", ["lm_head"], ("'model.embed_tokens.weight' in the root unit", "'lm_head.weight' in unit")),
        ("t5", ["encoder", "decoder"], ("'shared.weight' in the root", "'encoder.embed_tokens.weight' in unit")),
    ],
)
def test_a_pattern_that_parts_a_tied_parameter_is_refused(
    name: str, patterns: list[str], places: tuple[str, str]
) -> None:
    with pytest.raises(ValueError, match="units part a tied parameter") as raised:
        find_units(ARCHITECTURES[name](), patterns)
    assert all(place in str(raised.value) for place in places)


def test_a_unit_around_a_tied_parameter_is_accepted() -> None:
    model = Model(Block(), Block())
    model.get_submodule("blocks.0").other = tied = nn.Linear(4, 4)
    tied.weight = model.get_parameter("blocks.0.inner.weight")
    assert names(find_units(model)) == ["blocks.0", "blocks.1"]
    with pytest.raises(ValueError, match=r"'blocks\.0\.inner\.weight' in unit 'blocks\.0\.inner'.* 'blocks\.0'"):
        find_units(model, ["Block", "*.inner"])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5))
def test_units_never_part_a_tied_parameter(ties: list[tuple[int, int]]) -> None:
    model = Model(*(Block() for _ in range(5)))
    linears = [model.first, *(block.inner for block in model.blocks)]
    for one, other in ties:
        linears[one].weight = linears[other].weight
    units = find_units(model)
    for unit in units:
        outside = {linear.weight for number, linear in enumerate(linears) if f"blocks.{number - 1}" != unit.name}
        assert unit.module.inner.weight not in outside
    alone = sum([linear.weight is other.weight for other in linears].count(True) == 1 for linear in linears[1:])
    assert len(units) == alone


def test_sizes_of_units() -> None:
    model = Model(Block(), Block().to(torch.bfloat16))
    model.head = nn.Linear(4, 4, bias=False)
    model.head.weight = model.first.weight
    assert unit_sizes(model, find_units(model)) == {"": 80, "blocks.0": 80, "blocks.1": 40}
    assert unit_sizes(model, find_units(model), torch.bfloat16) == {"": 40, "blocks.0": 40, "blocks.1": 40}
    nested = find_units(model, ["Block", "blocks.0.inner"])
    assert unit_sizes(model, nested) == {"": 80, "blocks.0": 0, "blocks.0.inner": 80, "blocks.1": 40}


def test_the_warning_of_a_single_unit() -> None:
    text = describe_single_unit(nn.Linear(1024, 1023))
    assert text == (
        "no units were found in Linear, so each process gathers the whole model at once (4 MiB); use units=[...] with "
        "patterns of names or class names of its modules"
    )


def test_the_warning_of_a_single_unit_names_the_classes_of_blocks() -> None:
    model = nn.ModuleDict({
        "blocks": nn.ModuleList([nn.Linear(8, 8), nn.Bilinear(8, 8, 8), nn.Linear(8, 8)]),
        "heads": nn.ModuleList([nn.Linear(2, 2), nn.Embedding(2, 2)]),
    })  # fmt: skip
    assert not find_units(model)
    assert describe_single_unit(model).endswith("class names of its modules, such as 'Linear' and 'Bilinear'")
    assert len(find_units(model, ["blocks.*"])) == 3
    shared = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    shared[1].weight = shared[0].weight
    assert not find_units(shared)
    assert describe_single_unit(shared).endswith("class names of its modules"), "they cannot be units"


def with_parameter(value: torch.Tensor, **kwargs: bool) -> nn.Module:
    model = Model(Block(), Block())
    model.get_submodule("blocks.1").scale = nn.Parameter(value, **kwargs)
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: with_parameter(torch.ones(2, 2).to_sparse()), "'blocks.1.scale' is sparse (sparse_coo)"),
        (lambda: Model(nn.LazyLinear(4)), "'blocks.0.weight' of a lazy module has no shape yet; pass a batch through"),
        (lambda: Model(nn.Embedding(4, 4, sparse=True)), "'blocks.0' has sparse gradients, which cannot be sharded"),
        (
            lambda: with_parameter(torch.ones(2, dtype=torch.bfloat16)),
            "unit 'blocks.1' trains 'blocks.1.scale' in bfloat16 and 'blocks.1.inner.weight' in float32; cast one",
        ),
        (
            lambda: Model(Block().double()),
            "the root unit trains 'first.weight' in float32 and 'blocks.0.inner.weight' in float64; cast one of them",
        ),
    ],
    ids=["sparse", "lazy", "sparse gradients", "dtypes", "dtypes of the root"],
)
def test_what_cannot_be_sharded_is_refused(make: Callable[[], nn.Module], sentence: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_units(model, find_units(model))


@contextmanager
def one_process() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.tensor(1.0).double(), torch.zeros(0, 2).bfloat16()])
def test_what_is_not_divided_is_not_checked(value: torch.Tensor) -> None:
    model = with_parameter(value)
    check_units(model, find_units(model))


def test_a_dtensor_is_refused() -> None:
    with one_process() as mesh:
        model = with_parameter(torch.ones(2))
        model.get_submodule("blocks.1").scale = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match=r"'blocks\.1\.scale' is a DTensor already; use a model that is not shard"):
            check_units(model, find_units(model))


def test_dtypes_may_differ_between_units_and_where_frozen() -> None:
    model = Model(Block(), Block().to(torch.bfloat16))
    check_units(model, find_units(model))
    adapted = with_parameter(torch.ones(2, dtype=torch.bfloat16))
    adapted.get_submodule("blocks.1.inner").requires_grad_(False)
    check_units(adapted, find_units(adapted))
    adapted.get_submodule("blocks.1.inner").requires_grad_(True)
    check_units(adapted, find_units(adapted, ["blocks.1", "*.1.inner"]))


@pytest.mark.parametrize(
    "make", [*ARCHITECTURES.values(), lambda: llama(vocab_size=500)], ids=[*ARCHITECTURES, "llama-large"]
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # torch warns from 2.13 on
def test_torch_shards_the_units_and_the_root(make: Callable[[], nn.Module]) -> None:
    model = make()
    units = find_units(model)
    parameters = {name: parameter.shape for name, parameter in model.named_parameters()}
    with one_process() as mesh:
        for unit in reversed(units):
            fully_shard(unit.module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert {name: parameter.shape for name, parameter in model.named_parameters()} == parameters
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        ids = torch.tensor([[1, 2, 3]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_torch_shards_nested_units() -> None:
    model = nn.Sequential(Block(), Block())
    with one_process() as mesh:
        for unit in reversed(find_units(model, ["Block", "*.inner"])):
            fully_shard(unit.module, mesh=mesh)
        fully_shard(model, mesh=mesh)(torch.ones(1, 4)).sum().backward()
        assert isinstance(model.get_parameter("1.inner.weight").grad, DTensor)
