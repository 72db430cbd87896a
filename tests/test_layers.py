"""The rules of CONTRIBUTING.md on layers and lengths, checked on the sources with `ast`."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import trainer_kit
import trainer_kit.callbacks

LAYERS = (
    {"_version", "errors", "state"},
    {"utils"},
    {"config", "profiling"},
    {"optim", "strategies", "checkpoint/format"},
    {"launch", "loss", "run", "trackers"},
    {"callback", "data", "memory", "report"},
    {"callbacks", "checkpoint"},
    {"accelerator", "debugging"},
    {"loop"},
    {"planning"},
    {"trainer"},
    {"tools"},
    {"cli"},
    {"__main__"},
)
LAYER_OF = {part: number for number, parts in enumerate(LAYERS, start=1) for part in parts}
parse = functools.cache(ast.parse)

LINES_OF_A_FILE = 450
LINES_OF_A_FUNCTION = 60

SEEN_BY_CALLBACKS = LAYERS[0] | LAYERS[1] | LAYERS[2] | {"callback", "run", "report", "trackers"}

# What a module other than a strategy must not name, as a word of its own or as part of a snake_case name.
HARDWARE = re.compile(r"(?<![a-z])(cuda|mps|xla|tpu|nccl|gloo|world_?size)(?![a-z])", re.IGNORECASE)

# Modules without a test file of their name, or folders of them, and why.
TESTED_ELSEWHERE = {
    "_version": "one constant",
    "run": "data alone; tests/report/test_summary.py prints a TrainOutput",
    "accelerator": "its modules are tested through the Accelerator",
    "memory": "its modules are tested through an estimate",
    "planning": "its modules are tested through the plan that they make",
    "report": "its modules are tested through the page that they make",
    "strategies/xla": "tests/xla runs them, in an environment of its own",
    "trackers": "tests/ecosystem/test_trackers_*.py run each with its package, tests/accelerator those of files",
    "tools/self_test": "tests/cli/test_test.py runs it, as the command does",
    "tools/verify/child": "the start of the processes that tests/tools/verify/test_verification.py compares",
    "tools/verify/recorder": "records what tests/tools/verify/test_verification.py and test_cause.py compare",
}


def test_each_module_has_a_test_file_of_its_name() -> None:
    tests, package = Path(__file__).parent, Path(trainer_kit.__file__).parent
    folders = [package, *trainer_kit.callbacks.__path__]
    modules = {
        "/".join(["callbacks"] * (folder != package) + [*path.relative_to(folder).with_suffix("").parts])
        for folder in map(Path, folders)
        for path in folder.rglob("*.py")
        if not path.name.startswith("__")
    }
    without = {name for name in modules if not _test_file(tests, name).exists()}
    exempt = {name: {each for each in without if f"{each}/".startswith(f"{name}/")} for name in TESTED_ELSEWHERE}
    assert without == set().union(*exempt.values()), "write tests/X/test_Y.py for trainer_kit/X/Y.py"
    assert all(exempt.values()), "these have their test files now: take them from TESTED_ELSEWHERE"


def _test_file(tests: Path, module: str) -> Path:
    folder, _, name = module.rpartition("/")
    return tests / folder / f"test_{name.lstrip('_')}.py"


def test_the_package_keeps_to_its_layers() -> None:
    found = violations(own_sources())
    assert not found, "\n".join(found)


def test_the_checker_reads_the_callbacks_too() -> None:
    names = set(own_sources())
    assert {"trainer_kit", "trainer_kit.callback", "trainer_kit.callbacks", "trainer_kit.strategies.base"} <= names
    assert any(name.startswith("trainer_kit.callbacks.") for name in names)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("state", "from trainer_kit.run import Run", "trainer_kit.state (layer 1) imports trainer_kit.run (layer 5)"),
        ("state", "import trainer_kit.run", "imports trainer_kit.run (layer 5)"),
        ("state", "from trainer_kit import run", "imports trainer_kit.run (layer 5)"),
        ("state", "from . import run", "imports trainer_kit.run (layer 5)"),
        ("state", "from .run import Run", "imports trainer_kit.run (layer 5)"),
        ("state", "def f():\n    from trainer_kit.run import Run", "imports trainer_kit.run (layer 5)"),
        ("state", "import importlib\nimportlib.import_module('trainer_kit.run')", "imports trainer_kit.run (layer 5)"),
        ("strategies.ddp", "from trainer_kit.optim import make", "(layer 4) imports trainer_kit.optim (layer 4)"),
        ("data.loader", "from ..callback import Callback", "imports trainer_kit.callback (layer 6)"),
        ("run", "if TYPE_CHECKING:\n    from trainer_kit.trainer import Trainer", "imports trainer_kit.trainer"),
        ("run", "from trainer_kit import Trainer", "imports 'Trainer' from the package's front"),
        ("run", "from trainer_kit import *", "imports '*' from the package's front"),
        ("novelty", "", "trainer_kit.novelty has no layer"),
        ("callbacks.ema", "from trainer_kit.loss import Loss", "a callback imports trainer_kit.loss"),
        ("checkpoint.format.commit", "from trainer_kit.run import Run", "(layer 4) imports trainer_kit.run (layer 5)"),
        ("callbacks.ema", "from trainer_kit.trainer import Trainer", "imports trainer_kit.trainer (layer 11)"),
        ("callbacks.ema", "from trainer_kit.callbacks.memory import Memory", "imports its sibling by the full name"),
        ("callbacks.ema", "from ..run import Run", "reaches out of callbacks/ by a relative import"),
        ("trainer", "import callbacks", "imports callbacks as a package of its own"),
        ("trainer", "from callbacks.memory import Memory", "imports callbacks as a package of its own"),
        ("loss", "import torch.distributed as dist", "trainer_kit.loss uses torch.distributed"),
        ("loss", "from torch import distributed", "trainer_kit.loss uses torch.distributed"),
        ("loss", "from torch.distributed.fsdp import FSDP", "trainer_kit.loss uses torch.distributed.fsdp"),
        ("loss", "import torch\ntorch.distributed.barrier()", "trainer_kit.loss uses torch.distributed"),
        ("loss", "def f():\n    import torch_xla.core.xla_model", "trainer_kit.loss uses torch_xla.core.xla_model"),
        ("loss", "import importlib\nimportlib.import_module('torch_xla')", "trainer_kit.loss uses torch_xla"),
        ("cli.main", "import torch.distributed", "trainer_kit.cli.main uses torch.distributed"),
        ("trainer", "import os\nos.environ['RANK']", "trainer_kit.trainer reads the environment (os.environ)"),
        ("trainer", "import os\nos.getenv('RANK')", "trainer_kit.trainer reads the environment (os.getenv)"),
        ("trainer", "from os import environ", "trainer_kit.trainer reads the environment (os.environ)"),
        ("trainer", "if device.type == 'cuda':\n    pass", "trainer_kit.trainer names the hardware: 'cuda'"),
        ("trainer", "x = f'{kind}:cuda'", "names the hardware: ':cuda'"),
        ("trainer", "torch.cuda.synchronize()", "names the hardware: 'cuda'"),
        ("trainer", "if is_xla:\n    pass", "names the hardware: 'is_xla'"),
        ("trainer", "if strategy.world_size > 1:\n    pass", "names the hardware: 'world_size'"),
        ("trainer", "def f(use_mps): ...", "names the hardware: 'use_mps'"),
        ("loop.train_step", "f(world_size=2)", "names the hardware: 'world_size'"),
        ("trainer", "from x import is_cuda_there", "names the hardware: 'is_cuda_there'"),
    ],
)
def test_the_checker_finds(module: str, source: str, complaint: str) -> None:
    assert any(complaint in found for found in violations({f"trainer_kit.{module}": source}))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("run", "from trainer_kit.strategies import Strategy\nfrom trainer_kit import utils, __version__"),
        ("callback", "if TYPE_CHECKING:\n    from trainer_kit.run import Run"),
        ("callbacks.ema", "from trainer_kit.run import Run\nfrom . import numbers\nfrom .numbers import pairs"),
        ("data.loader", "from trainer_kit.data.sampling import Slot\nfrom .collate import Collator"),
        ("strategies.ddp", "import os, torch.distributed\nrank = int(os.environ['RANK'])\ntorch.cuda.set_device(rank)"),
        ("config.environment", "import os\nos.environ.get('RANK')"),
        ("launch.processes", "import torch.distributed"),
        ("trainer", '"""Runs on cuda, mps and xla, with any world_size."""\nimport json\njson.dumps(stamps)'),
        ("trainer", "from trainer_kit.callbacks import default_callbacks"),
        ("checkpoint.manager", "from trainer_kit.checkpoint.format.commit import write_checkpoint"),
        ("cli.env", "import torch\ntorch.cuda.is_available()"),
    ],
)
def test_the_checker_lets_pass(module: str, source: str) -> None:
    assert violations({f"trainer_kit.{module}": source}) == []


def test_the_checker_finds_a_circle() -> None:
    circle = {
        "trainer_kit.data": "",
        "trainer_kit.data.sampling": "from trainer_kit.data.map_loader import Loader",
        "trainer_kit.data.map_loader": "if TYPE_CHECKING:\n    from .sampling import Order",
    }
    (found,) = violations(circle)
    assert found.startswith("circle: ")
    assert {"trainer_kit.data.sampling", "trainer_kit.data.map_loader"} <= set(
        found.removeprefix("circle: ").split(", ")
    )


def test_the_checker_finds_a_circle_through_a_package() -> None:
    circle = {
        "trainer_kit.data": "from trainer_kit.data.sampling import Order",
        "trainer_kit.data.sampling": "from trainer_kit.data import Loader",
    }
    assert any(found.startswith("circle: ") for found in violations(circle))


def test_files_and_functions_are_short() -> None:
    found = too_long(own_sources())
    assert not found, "\n".join(found)


def test_the_checker_finds_what_is_too_long() -> None:
    function = "def f():\n" + "    x = 1\n" * (LINES_OF_A_FUNCTION - 1)
    method = "class A:\n    @property\n    async def f(self):\n" + "        x = 1\n" * LINES_OF_A_FUNCTION
    sources = {"fits": function + "\n" * (LINES_OF_A_FILE - LINES_OF_A_FUNCTION), "function": method}
    assert too_long(sources) == ["function.f has 61 lines"]
    assert too_long({"file": "\n" * (LINES_OF_A_FILE + 1)}) == ["file has 451 lines"]


def own_sources() -> dict[str, str]:
    """Module name to source of every module of the package."""
    return {
        name: path.read_text(encoding="utf-8")
        for package in (trainer_kit, trainer_kit.callbacks)  # the second is a link, which `rglob` need not follow
        for name, path in modules_below(package.__name__, Path(str(package.__file__)).parent)
    }


def modules_below(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of every module in `folder`, which holds `package`."""
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)]), path


def violations(sources: dict[str, str]) -> list[str]:
    """What breaks the rules in `sources` (module name to source), one sentence each."""
    trees = {name: parse(source) for name, source in sources.items()}
    packages = {name for name in trees if any(other.startswith(f"{name}.") for other in trees)}
    imports = {name: list(imported(name, name in packages, tree)) for name, tree in trees.items()}
    found = []
    for name, tree in trees.items():
        part = part_of(name)
        if part is None:  # the front of the package, which names everything and imports it when it is used
            continue
        if part not in LAYER_OF:
            found.append(f"{name} has no layer; add it to LAYERS")
            continue
        found += wrong_layers(name, imports[name])
        found += wrong_forms(name, tree)
        if part not in {"strategies", "launch"}:
            found += wrong_libraries(name, tree, imports[name])
        if part not in {"strategies", "launch"} and name != "trainer_kit.config.environment":
            found += environment_reads(name, tree)
        if name.removeprefix("trainer_kit.") in {"trainer", "loop.train_step", "loop.training_loop"}:
            found += hardware_names(name, tree)
    return found + circles(imports)


def too_long(sources: dict[str, str]) -> list[str]:
    """Files and functions in `sources` (module name to source) with too many lines, one sentence each."""
    found = []
    for module, source in sources.items():
        if (lines := len(source.splitlines())) > LINES_OF_A_FILE:
            found.append(f"{module} has {lines} lines")
        for node in ast.walk(parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = int(node.end_lineno or 0) - node.lineno + 1
                if lines > LINES_OF_A_FUNCTION:
                    found.append(f"{module}.{node.name} has {lines} lines")
    return found


def part_of(module: str) -> str | None:
    """The part that a module belongs to: "data" for trainer_kit.data.map_loader, None for trainer_kit itself."""
    parts = module.split(".")
    if parts[1:3] == ["checkpoint", "format"]:
        return "checkpoint/format"
    return parts[1] if len(parts) > 1 else None


def imported(module: str, is_package: bool, tree: ast.Module) -> Iterator[str]:
    """Full name of everything that `module` imports, wherever the import stands: modules, and names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(module, is_package, node)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (word.value for word in node.args[:1] if is_string(word))


def absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The module that a `from … import` names, a relative one resolved."""
    if not node.level:
        return str(node.module)
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def wrong_layers(module: str, imports: list[str]) -> Iterator[str]:
    """Imports of the package's own modules that lead upwards or sideways."""
    part = str(part_of(module))
    for name in imports:
        target = part_of(name) if name.startswith("trainer_kit.") else None
        if target is None or target in {part, "__version__"}:
            continue
        target_name = f"trainer_kit.{target}"
        if target not in LAYER_OF:
            yield f"{module} imports {target!r} from the package's front; import it from its module"
        elif LAYER_OF[target] >= LAYER_OF[part]:
            yield f"{module} (layer {LAYER_OF[part]}) imports {target_name} (layer {LAYER_OF[target]})"
        elif part == "callbacks" and target not in SEEN_BY_CALLBACKS:
            yield f"{module}: a callback imports {target_name}"


def wrong_forms(module: str, tree: ast.Module) -> Iterator[str]:
    """Imports of callbacks, or inside callbacks, that are written the wrong way."""
    inside = part_of(module) == "callbacks"
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)] if not node.level else []
            if inside and node.level > 1:
                yield f"{module} reaches out of callbacks/ by a relative import"
        for name in names:
            if name.split(".")[0] == "callbacks":
                yield f"{module} imports callbacks as a package of its own"
            if inside and name.startswith("trainer_kit.callbacks"):
                yield f"{module} imports its sibling by the full name"


def wrong_libraries(module: str, tree: ast.Module, imports: list[str]) -> Iterator[str]:
    """Uses of torch.distributed and torch_xla."""
    attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for name in dict.fromkeys([*imports, *attributes]):
        if re.match(r"(torch\.distributed|torch_xla)(\.|$)", name):
            yield f"{module} uses {name}"


def environment_reads(module: str, tree: ast.Module) -> Iterator[str]:
    """Uses of the process's environment."""
    for node in ast.walk(tree):
        names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        for name in {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}.intersection(names):
            yield f"{module} reads the environment ({name})"


def hardware_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Names, attributes, arguments and strings (docstrings aside) that speak of devices, backends or world sizes."""
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str) and id(node) not in prose and HARDWARE.search(word):
                yield f"{module} names the hardware: {word!r}"


def circles(imports: dict[str, list[str]]) -> list[str]:
    """The first circle among the modules, or nothing."""
    graph = {}
    for module, names in imports.items():
        if part_of(module) is None:
            continue
        # A name in a module is an import of the module: the longest prefix that is a module.
        targets = {next((t for t in prefixes(name) if t in imports), None) for name in names}
        graph[module] = {target for target in targets if target and part_of(target) and target != module}
    try:
        TopologicalSorter({module: sorted(targets) for module, targets in graph.items()}).prepare()
    except CycleError as error:
        return [f"circle: {', '.join(error.args[1])}"]
    return []


def prefixes(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`."""
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
