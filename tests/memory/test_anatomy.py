from __future__ import annotations

import json

from trainer_kit.memory import Anatomy, Component
from trainer_kit.memory.anatomy import KINDS


def anatomy(**sizes: int) -> Anatomy:
    components = tuple(Component(name, nbytes, "counted") for name, nbytes in sizes.items())
    return Anatomy(components, sum(sizes.values()), "cpu", 1000, 900, 8, {"x": [8, 3]}, model_flops=10**9)


def test_a_table_has_a_line_for_each_component() -> None:
    lines = anatomy(weights=4000, gradients=3600, runtime=2**20).table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["weights", "gradients", "runtime", "peak"]
    assert lines[1].split()[1:5] == ["3.906", "KiB", "4.00", "B"]
    assert lines[1].endswith(KINDS["weights"])
    assert lines[-1].endswith("of a step with micro-batches of 8 on cpu, 1 GFLOP of the model")


def test_a_table_beside_what_was_measured() -> None:
    lines = anatomy(weights=4000).table(anatomy(weights=2048, temporary=512)).splitlines()
    assert lines[0].split() == ["memory", "measured", "per", "weight", "what"]
    assert lines[1].split()[1:5] == ["3.906", "KiB", "2", "KiB"]
    assert lines[2].split()[:5] == ["temporary", "0", "B", "512", "B"]
    assert lines[3].split()[1:5] == ["3.906", "KiB", "2.5", "KiB"]


def test_all_of_it_goes_into_json() -> None:
    values = json.loads(json.dumps(anatomy(weights=4000).to_dict()))
    assert values["components"] == [{"name": "weights", "nbytes": 4000, "source": "counted"}]
    assert (values["peak"], values["shape"], values["model_flops"]) == (4000, {"x": [8, 3]}, 10**9)
