"""How much memory there is for an engine: of a GPU what its driver says, else of the machine and of the container.

    free    the least of what the system could give without swapping (MemAvailable) and what is left under the limits of
            the control groups that the process is in, versions 1 and 2
    all     the least of the machine's memory and of those limits

It knows no model and no engine.
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
    return max(0, min([_available(), *(limit - used for limit, used in _limits())]))


def all_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _limits())])


def _available() -> int:
    """The page cache counts: it is given up when memory is asked for, and it may be most of the memory."""
    kibibytes = _field(Path(ROOT, "proc/meminfo"), "MemAvailable:")
    if kibibytes is None:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return kibibytes * 1024


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, used without page cache that can be given up) of each control group that limits this process."""
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
    """Limits of a group and of those that it lies in, each with what is used of it. In a container the path may be one
    of the host, which is not there; then the group is what is mounted."""
    base = Path(ROOT, mount)
    group = base / path.strip("/")
    while True:
        most = _number(group / limit)
        if most is not None and most < UNLIMITED:
            yield most, max(0, (_number(group / usage) or 0) - (_field(group / "memory.stat", cache) or 0))
        if group == base or base not in group.parents:
            return
        group = group.parent


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int | None:
    """The number after a name at the beginning of a line; None where there is none."""
    try:
        lines = map(str.split, path.read_text("ascii").splitlines())
        return next((int(line[1]) for line in lines if line[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None
