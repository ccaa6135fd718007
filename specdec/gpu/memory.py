"""How much memory an engine can use: a GPU's from its driver; a CPU's from the machine and the container.

    free    the smaller of the memory available without swapping (MemAvailable) and the memory left under the limits of
            the process's control groups, versions 1 and 2
    all     the smaller of the machine's memory and these limits

This module knows no model and no engine.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path("/")
UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2^63."""


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can be taken now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    kibibytes = _number(Path(ROOT, "proc/meminfo"), "MemAvailable:")  # with the page cache, which is freed on demand
    if kibibytes is None:  # not Linux
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    else:
        available = kibibytes * 1024
    return max(0, min([available, *(limit - used for limit, used in _limits())]))


def all_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, use without reclaimable page cache) of each control group that limits this process."""
    try:
        groups = Path(ROOT, "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for group in groups:
        _, _, rest = group.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _limits_above("sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _limits_above("sys/fs/cgroup/memory", path, *names)


def _limits_above(mount: str, path: str, limit: str, usage: str, cache: str) -> Iterator[tuple[int, int]]:
    """Limits of a group and of its parents, each with its use. In a container the path may be the host's and not exist;
    then the mount itself is the group."""
    base = Path(ROOT, mount)
    group = base / path.strip("/")
    for folder in (group, *group.parents):
        most = _number(folder / limit)
        if most is not None and most < UNLIMITED:
            yield most, max(0, (_number(folder / usage) or 0) - (_number(folder / "memory.stat", cache) or 0))
        if folder == base:
            return


def _number(path: Path, *name: str) -> int | None:
    """A file's number, or the one after a name at the beginning of a line; None if there is none, or it is "max"."""
    try:
        lines = map(str.split, path.read_text("ascii").splitlines())
        return next((int(line[len(name)]) for line in lines if line[: len(name)] == [*name]), None)
    except (OSError, ValueError, IndexError):
        return None
