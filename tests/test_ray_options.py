"""`examples/ray_serve.py` without Ray: what a replica of several GPUs asks for."""

from pathlib import Path
from types import ModuleType

import pytest
from script_module import module_of

PATH = Path(__file__).resolve().parent.parent / "examples" / "ray_serve.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return module_of(PATH)


@pytest.mark.parametrize(
    ("given", "gpus", "shared_by"),
    [
        ([], 0, 1),
        (["--gpus", "1"], 1, 1),
        (["--gpus", "0.5"], 0.5, 1),
        (["--tensor-parallel", "2"], 2, 2),
        (["--tensor-parallel", "2", "--gpus", "4"], 4, 2),
    ],
)
def test_a_replica_is_given_the_gpus_that_share_its_target(
    given: list[str], gpus: float, shared_by: int, example: ModuleType
):
    options = example.arguments(given)
    assert example.actor_options(options) == {"num_cpus": 1, "num_gpus": gpus}
    assert example.engine_config(options).tensor_parallel == shared_by


def test_fewer_gpus_than_share_the_target_are_refused(example: ModuleType):
    with pytest.raises(SystemExit, match="--gpus 1 a replica are fewer than --tensor-parallel 2"):
        example.actor_options(example.arguments(["--tensor-parallel", "2", "--gpus", "1"]))
