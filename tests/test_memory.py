"""Pools are sized by the memory that this process may really take: MemAvailable, and the limits of control groups."""

from pathlib import Path

import pytest
import torch

import specdec.gpu.memory
from specdec import Engine, EngineConfig
from specdec.errors import CapacityError
from specdec.gpu.memory import all_bytes, free_bytes

CPU = torch.device("cpu")
GIB, MIB = 1 << 30, 1 << 20


def system(root: Path, groups: str, **files: str) -> None:
    """A /proc and a /sys/fs/cgroup of these files, `_` in a name standing for what Python forbids there."""
    (root / "proc/self").mkdir(parents=True)
    available = "MemTotal: 67108864 kB\nMemFree: 1048576 kB\nMemAvailable: 33554432 kB\n"
    (root / "proc/meminfo").write_text(available)
    (root / "proc/self/cgroup").write_text(groups)


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(specdec.gpu.memory, "ROOT", tmp_path)
    return tmp_path


def test_the_page_cache_counts_as_free(root):
    """MemFree was taken, which is little on a machine that has read files."""
    system(root, "0::/\n")
    assert free_bytes(CPU) == 32 * GIB


def test_the_limit_of_a_container_of_version_2_counts(root):
    """The path is the host's, and what is mounted is the container's own group."""
    system(root, "0::/kubepods/pod1/abc\n")
    group(
        root / "sys/fs/cgroup",
        memory__max=4 * GIB,
        memory__current=3 * GIB,
        memory__stat=f"file 9\ninactive_file {GIB}",
    )
    assert free_bytes(CPU) == 2 * GIB
    assert all_bytes(CPU) == 4 * GIB


def test_the_limit_of_a_group_above_counts(root):
    system(root, "0::/user/slice/one\n")
    base = root / "sys/fs/cgroup"
    group(base / "user/slice/one", memory__max="max", memory__current=MIB)
    group(base / "user/slice", memory__max=6 * GIB, memory__current=5 * GIB)
    group(base / "user", memory__max=20 * GIB, memory__current=5 * GIB)
    assert free_bytes(CPU) == GIB


def test_the_limit_of_version_1_counts(root):
    system(root, "12:cpu,cpuacct:/docker/x\n5:memory:/docker/x\n")
    group(
        root / "sys/fs/cgroup/memory/docker/x",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"total_inactive_file {512 * MIB}",
    )
    group(root / "sys/fs/cgroup/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=9 * GIB)
    assert (free_bytes(CPU), all_bytes(CPU)) == (GIB + 512 * MIB, 2 * GIB)


def test_a_full_group_leaves_nothing_and_not_less(root):
    system(root, "0::/\n")
    group(root / "sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert free_bytes(CPU) == 0


def test_without_proc_the_system_is_asked(root):
    assert 0 < free_bytes(CPU) <= all_bytes(CPU)


def test_an_engine_in_a_small_container_makes_small_pools(root, make_target):
    """A quarter of the machine's free memory was taken, and the process killed for it."""
    system(root, "0::/\n")
    group(root / "sys/fs/cgroup", memory__max=12 * MIB, memory__current=8 * MIB)
    engine = Engine.from_pretrained(make_target("llama"), config=EngineConfig(max_batch_size=64))
    assert sum(engine.cache.bytes_by_group().values()) <= MIB * 1.1


@pytest.mark.parametrize(("space", "slots"), [("full", 3), ("full", 5), ("swa", 3)])
def test_pools_that_can_hold_no_request_are_refused(space, slots, make_target):
    """`full_slots=3` was taken, and every request refused later."""
    sizes = {"full_slots": 64, "swa_slots": 64, f"{space}_slots": slots}
    with pytest.raises(CapacityError, match=f"{space}_slots={slots} can hold no request.* takes 6 slots") as error:
        Engine.from_pretrained(make_target("gemma4-e2b"), "ngram", config=EngineConfig(max_model_len=64, **sizes))
    assert "\n" not in str(error.value) and "give 6 or more" in str(error.value)
