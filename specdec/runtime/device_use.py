"""What each device of an engine holds: those that share a target have as much of its K/V each.

Nothing is decided by it; a GPU's driver is asked each time.
"""

from typing import NamedTuple

from specdec.gpu.memory import all_bytes, free_bytes
from specdec.kvcache.cache import KVCache
from specdec.models.target import TargetModel


class DeviceUse(NamedTuple):
    """kv_bytes: of the engine's K/V pools there. free, total: memory of the device; of a CPU, of the machine."""

    device: str
    kv_bytes: int
    free_bytes: int
    total_bytes: int


def device_use(target: TargetModel, cache: KVCache) -> tuple[DeviceUse, ...]:
    """One for each device, in the order of ranks; ranks on a CPU are one device each."""
    devices = (target.device,) if target.ranks is None else target.ranks.devices
    held = [0] * len(devices)
    for store in cache.stores:
        held[store.rank] += sum(layer.k.nbytes + layer.v.nbytes for layer in store.layers.values())
    return tuple(
        DeviceUse(str(device), kv_bytes, free_bytes(device), all_bytes(device))
        for device, kv_bytes in zip(devices, held, strict=True)
    )
