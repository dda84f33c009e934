"""`Device`: the memory and bandwidth of a GPU, as its maker states them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpolicy.errors import KVPolicyError, nearest


class PlanError(KVPolicyError, ValueError):
    """What a plan is asked for is wrong: its context, its batch or its GPU."""


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        name: what it is called.
        memory: bytes.
        bandwidth: bytes a second that it reads of its memory; None where that is not known.
        link: bytes a second that come from the CPU's memory; None likewise.
        source: where the figures are from.
    """

    name: str
    memory: int
    bandwidth: float | None = None
    link: float | None = None
    source: str = ""


_GIGA, _TERA = 10**9, 10**12
# One direction of 16 lanes: data sheets give both together.
_PCIE4, _PCIE5 = 32 * _GIGA, 64 * _GIGA

DEVICES = {
    device.name: device
    for device in (
        Device("a10", 24 * _GIGA, 600 * _GIGA, _PCIE4, "stated by NVIDIA for the A10"),
        Device("a100", 80 * _GIGA, 2039 * _GIGA, _PCIE4, "stated by NVIDIA for the A100 80GB SXM"),
        Device("a100-40gb", 40 * _GIGA, 1555 * _GIGA, _PCIE4, "stated by NVIDIA for the A100 40GB"),
        Device("b200", 180 * _GIGA, 8 * _TERA, _PCIE5, "stated by NVIDIA for one of the 8 GPUs of a DGX B200"),
        Device("h100", 80 * _GIGA, 3.35 * _TERA, _PCIE5, "stated by NVIDIA for the H100 SXM"),
        Device("h100-nvl", 94 * _GIGA, 3.9 * _TERA, _PCIE5, "stated by NVIDIA for the H100 NVL"),
        Device("h200", 141 * _GIGA, 4.8 * _TERA, _PCIE5, "stated by NVIDIA for the H200"),
        Device("l4", 24 * _GIGA, 300 * _GIGA, _PCIE4, "stated by NVIDIA for the L4"),
        Device("l40s", 48 * _GIGA, 864 * _GIGA, _PCIE4, "stated by NVIDIA for the L40S"),
        Device("mi300x", 192 * _GIGA, 5.3 * _TERA, _PCIE5, "stated by AMD for the Instinct MI300X"),
        Device("rtx-3090", 24 * _GIGA, 936 * _GIGA, _PCIE4, "stated by NVIDIA for the GeForce RTX 3090"),
        Device("rtx-4090", 24 * _GIGA, 1008 * _GIGA, _PCIE4, "stated by NVIDIA for the GeForce RTX 4090"),
    )
}
"""Those known by name. Their memory is counted in 10^9 bytes; what a card has beyond that, its driver takes."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)


def find_device(text: str) -> Device:
    """Return the GPU of a name, or one of a memory size.

    Args:
        text: a name of `DEVICES`, or a size in GB (10^9 bytes) or GiB (2^30).

    Raises:
        PlanError: when it is neither.

    >>> find_device("H100").bandwidth, find_device("24GB").memory, find_device("24 GiB").memory
    (3350000000000.0, 24000000000, 25769803776)
    """
    if known := DEVICES.get(text.strip().lower()):
        return known
    size = _SIZE.fullmatch(text.strip())
    if size is None or not float(size[1]):
        raise PlanError(f"GPU: expected a size, such as 24GB, or a name, got {text!r}.{nearest(text, DEVICES)}")
    return Device(text.strip(), round(float(size[1]) * (2**30 if "i" in size[2].lower() else _GIGA)))
