"""Checkpoints by a hostile author, whose checksums are all right: they load, or a sentence says why they do not.

All of it runs in a process of its own, with 1 GiB of memory beyond what it has at the beginning and a limit of time.
`python tests/checkpoint/format/test_fuzz.py 10000` tries more examples, other ones each time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from safetensors import safe_open

from trainer_kit.checkpoint import (
    CheckpointError,
    Manifest,
    newest_valid,
    read_arguments,
    read_state,
    take_snapshot,
    verify,
    write_checkpoint,
)
from trainer_kit.checkpoint.format.json_files import JSON_BYTES, JSON_VALUES, checksum
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.checkpoint.format.manifest import FileEntry
from trainer_kit.checkpoint.format.safetensors_reader import load_source, read_header
from trainer_kit.utils.pytree import plain_values, unflatten_state

_EXAMPLES = 150
_MEMORY_BYTES = 2**30
_SECONDS = 280

FUZZES: list[Callable[[Path, int, bool], None]] = []

numbers = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([8, 16, 24, 32, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 10**10]),
)
NAMES = [
    *("a", "b", "model.safetensors", "state", "state/trainer.json", "manifest.json", "model.safetensors.index.json"),
    *(
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "CON",
        "../x",
        "/etc/passwd",
        "state/../a",
    ),
    *(
        "C:\\x",
        "a\\b",
        "\\",
        "a//b",
        "./a",
        "a/",
        ".",
        "..",
        "",
        "\0",
        "e\u0301",
        "\u202e",
        "\ud800",
        "a\nb",
        "x" * 300,
    ),
    *("__metadata__", "trainer_kit.complex", "dtype", "shape", "data_offsets", "__kind__", "value"),
]
names = st.one_of(st.sampled_from(NAMES), st.text(max_size=5))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), names),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=6,
)


def fuzz(function: Callable[..., None]) -> Callable[..., None]:
    """Tries a function (a folder to work in, then `draw`) with a fresh copy of the checkpoint each time."""

    def run(whole: Path, examples: int, is_random: bool) -> None:
        options = {"max_examples": examples, "deadline": None, "derandomize": not is_random, "database": None}

        @hypothesis.settings(**options, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(st.data())
        def test(data: st.DataObject) -> None:
            with tempfile.TemporaryDirectory(dir=whole.parent) as folder:
                checkpoint = Path(shutil.copytree(whole, Path(folder) / whole.name))
                function(checkpoint, data.draw)

        test()

    FUZZES.append(run)
    return function


def make(output_dir: Path) -> Path:
    weights = {"a": torch.ones(2, 3), "b": torch.ones(6), "c": torch.ones(2, dtype=torch.complex128)}
    states = {"trainer": {"step": 3, 2: torch.ones(3), "tied": [torch.zeros(2, dtype=torch.int8)]}}
    return write_checkpoint(output_dir, take_snapshot(3, weights, states, arguments={"seed": 1}), max_shard_size=40)


def seal(checkpoint: Path) -> None:
    """A manifest that says of all files what they are."""
    found = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    files = {path.relative_to(checkpoint).as_posix(): FileEntry(path.stat().st_size, checksum(path)) for path in found}
    (checkpoint / "manifest.json").write_text(json.dumps(Manifest.of(files, 3, 1).to_json()))


def read(checkpoint: Path) -> None:
    """Reads all there is, as a resume does; only the errors for users are let pass."""
    said: list[str] = []
    if newest_valid(checkpoint.parent, said.append) is None:
        assert len(said) == 1
        assert "\n" not in said[0].replace(str(checkpoint), "")
    model = torch.nn.ParameterDict({"a": torch.zeros(2, 3), "b": torch.zeros(6)})
    for attempt in (
        lambda: verify(checkpoint),
        lambda: read_arguments(checkpoint),
        lambda: read_state(checkpoint, "trainer"),
    ):
        with contextlib.suppress(CheckpointError):
            attempt()
    with contextlib.suppress(ValueError):  # that of another model too
        load_weights(model, checkpoint, strict=False, is_verified=True)


def mutated(draw: Any, tree: Any) -> Any:
    """A tree with something else in one or two places."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        tree = _mutated_once(draw, tree)
    return tree


def _mutated_once(draw: Any, tree: Any) -> Any:
    if not isinstance(tree, (dict, list)) or not tree or draw(st.integers(0, 15)) == 0:
        return draw(anything)
    key = draw(st.sampled_from(list(tree) if isinstance(tree, dict) else range(len(tree))))
    action = draw(st.sampled_from([*["deeper"] * 9, "delete", "double", "rename"]))
    if action == "deeper":
        tree[key] = _mutated_once(draw, tree[key])
    elif action == "delete":
        del tree[key]
    elif isinstance(tree, list):
        tree.append(copy.deepcopy(tree[key]))
    else:
        tree[draw(names)] = tree[key] if action == "double" else tree.pop(key)
    return tree


def damaged(draw: Any, content: bytes) -> bytes:
    """Bytes with a part of them changed, doubled or gone."""
    for _ in range(draw(st.integers(1, 3))):
        begin, end = sorted(draw(st.tuples(*[st.integers(0, len(content))] * 2)))
        part = draw(st.one_of(st.binary(max_size=9), st.just(content[begin:end] * 2), st.just(b'"[{,}]:')))
        content = content[:begin] + part + content[end if draw(st.booleans()) else begin :]
    return content


def dumped(tree: Any) -> bytes:
    return json.dumps(tree).encode()


@fuzz
def fuzz_of_manifests(checkpoint: Path, draw: Any) -> None:
    from trainer_kit.checkpoint.format.manifest import _content_checksum

    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("checksum")
    if draw(st.booleans()):
        tree = mutated(draw, content)
    else:
        entry = st.fixed_dictionaries({"size": numbers, "checksum": names})
        tree = {**content, "files": draw(st.dictionaries(names, entry, min_size=1, max_size=3))}
    path.write_bytes(dumped({**tree, "checksum": _content_checksum(tree)} if isinstance(tree, dict) else tree))
    read(checkpoint)


@fuzz
def fuzz_of_json_files(checkpoint: Path, draw: Any) -> None:
    files = ("manifest.json", "model.safetensors.index.json", "state/trainer.json", "arguments.json")
    path = checkpoint / draw(st.sampled_from(files))
    path.write_bytes(damaged(draw, path.read_bytes()))
    if path.name != "manifest.json":
        seal(checkpoint)
    read(checkpoint)


@fuzz
def fuzz_of_indices(checkpoint: Path, draw: Any) -> None:
    path = checkpoint / "model.safetensors.index.json"
    tree = json.loads(path.read_text())
    if draw(st.booleans()):
        tree["weight_map"] |= draw(st.dictionaries(names, names, max_size=3))
    path.write_bytes(dumped(mutated(draw, tree)))
    seal(checkpoint)
    read(checkpoint)


@fuzz
def fuzz_of_headers(checkpoint: Path, draw: Any) -> None:
    path = checkpoint / draw(st.sampled_from(["model-00001-of-00003.safetensors", "state/trainer.safetensors"]))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    fault = draw(st.sampled_from(["tree", "tree", "tree", "bytes", "length", "data"]))
    if fault == "tree":
        header = dumped(mutated(draw, json.loads(header)))
    elif fault == "bytes":
        header = damaged(draw, header)
    elif fault == "data":
        data = draw(st.one_of(st.binary(max_size=30), st.just(data[:-1])))
    length = draw(st.integers(0, 2**64 - 1) | st.integers(0, 200)) if fault == "length" else len(header)
    path.write_bytes(struct.pack("<Q", length) + header + data)
    seal(checkpoint)
    read(checkpoint)
    if fault != "bytes":  # which may leave a name twice: the last of them counts here, whatever the first one is
        compare_with_safetensors(path)


@st.composite
def entries(draw: Any) -> dict[str, Any]:
    """An entry of a header that nearly makes sense, and often does."""
    dtype, size = draw(st.sampled_from([("F32", 4), ("U8", 1), ("F64", 8), ("BOOL", 1), ("F16", 2)]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    start = draw(st.integers(0, 3)) * 4
    offsets = [start, start + math.prod(shape) * size]
    return {"dtype": dtype, "shape": shape, "data_offsets": draw(st.sampled_from([offsets, offsets, [0, 8], [8, 0]]))}


@fuzz
def fuzz_of_offsets(checkpoint: Path, draw: Any) -> None:
    header = draw(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), entries(), min_size=1))
    end = max(entry["data_offsets"][1] for entry in header.values())
    header["__metadata__"] = draw(st.one_of(st.none(), st.dictionaries(names, names, max_size=2)))
    path = checkpoint / "model-00001-of-00003.safetensors"
    _put(path, dumped(header), bytes(range(end)))
    seal(checkpoint)
    read(checkpoint)
    compare_with_safetensors(path)


def compare_with_safetensors(path: Path) -> None:
    """What is read here is read by safetensors' own reader too, and is the same."""
    try:
        source = read_header(path)
    except CheckpointError:
        return
    ours = load_source(source)
    with safe_open(path, framework="pt") as file:
        theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert source.entries.keys() == theirs.keys()
    for name, tensor in theirs.items():
        tensor = torch.view_as_complex(tensor.clone()) if ours[name].dtype == torch.complex128 else tensor
        assert ours[name].shape == tensor.shape
        assert ours[name].reshape(-1).view(torch.uint8).equal(tensor.clone().reshape(-1).view(torch.uint8))


KINDS = [
    *("int", "float", "bytes", "path", "dtype", "device", "tuple", "size", "set", "frozenset", "dict", "ordered_dict"),
    *("deque", "counter", "tensor", "ndarray", "numpy", "module", "object"),
]
TEXTS = [
    *("<f4", "|O", "<M8[s]", "|S0", "|S999999999", "<U0", "f4,f4", "|V8", "<c16", "torch.float32", "torch.os", "cpu"),
    *("cuda:99999", "1e999", "nan", "0000", "a", "b", "c", "0x" + "f" * 99),
]
kinds = st.sampled_from(KINDS)
texts = st.one_of(st.sampled_from(TEXTS), names)
trees = st.recursive(
    st.one_of(st.none(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.fixed_dictionaries({"__kind__": kinds, "value": inner}),
        st.fixed_dictionaries({"__kind__": kinds, "value": texts, "dtype": texts, "shape": st.lists(numbers)}),
        st.fixed_dictionaries({"__kind__": st.just("deque"), "value": st.lists(inner, max_size=3), "maxlen": inner}),
        st.fixed_dictionaries({"__kind__": kinds, "value": st.lists(st.lists(inner, min_size=2, max_size=2))}),
    ),
    max_leaves=8,
)


@fuzz
def fuzz_of_states(checkpoint: Path, draw: Any) -> None:
    tree = json.loads(dumped(draw(trees)))
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(0), "c": torch.ones(3, dtype=torch.uint8)}
    for attempt in (lambda: unflatten_state(tree, tensors), lambda: list(plain_values(tree))):
        with contextlib.suppress(ValueError):
            attempt()


def fuzz_of_sizes(whole: Path, examples: int, is_random: bool) -> None:
    """JSON at and beyond the limits: not only short inputs are taken or refused in little memory."""
    manifest, state, shard = "manifest.json", "state/trainer.json", "model-00001-of-00003.safetensors"
    contents: list[tuple[str, Callable[[], bytes]]] = [
        *((path, lambda: b"[" * 2**20) for path in (manifest, state, shard)),
        *((path, lambda: b'{"a":' * 800 + b"1" + b"}" * 800) for path in (manifest, state, shard)),
        (state, lambda: b"[" + b"[]," * 2**20 + b"[]]"),
        (shard, lambda: b"{" + b",".join(b'"%x":1' % number for number in range(2**19)) + b"}"),
        (manifest, lambda: b"[" + b"1," * JSON_VALUES + b"1]"),
        (state, lambda: b'["' + b"a" * (JSON_BYTES - 10) + '\U0001f600"]'.encode()),
        (shard, lambda: b'["' + b"a" * JSON_BYTES + b'"]'),
        (manifest, lambda: b"1" * 2**22),
        (state, lambda: b"0." + b"1" * 2**22),
        (shard, lambda: b"1e" + b"1" * 2**22),
    ]
    for path, make_content in contents:
        with tempfile.TemporaryDirectory(dir=whole.parent) as folder:
            checkpoint = Path(shutil.copytree(whole, Path(folder) / whole.name))
            _put(checkpoint / path, make_content())
            if path != manifest:
                seal(checkpoint)
            read(checkpoint)


def _put(path: Path, content: bytes, data: bytes = b"") -> None:
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(content)) if path.suffix == ".safetensors" else b"")
        file.write(content)
        file.write(data)


FUZZES.append(fuzz_of_sizes)


def main(examples: int = _EXAMPLES, is_random: bool = False) -> None:
    import resource

    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + _MEMORY_BYTES, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        whole = make(Path(folder))
        load_weights(torch.nn.ParameterDict({"a": torch.zeros(2, 3)}), whole, strict=False, is_verified=True)
        for each in FUZZES:
            each(whole, examples, is_random)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit of memory")
def test_hostile_files_are_refused_with_a_sentence_in_bounded_memory_and_time() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__], env=environment, timeout=_SECONDS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), is_random=len(sys.argv) > 1)
