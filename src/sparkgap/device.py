# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Device: what the planner has to know of the machine, as plain values.

Every choice is made from such values and never by asking the machine again, so that a
plan for a device which is not there can be made and tested.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Device:
    """A place to run a draft step.

    capability: CUDA compute capability, None on a CPU; sms, l2_bytes, shared_bytes (the
    most that one block may ask for) are 0 on a CPU; memory_bytes: all of it.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    sms: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0

    @classmethod
    def cpu(cls) -> "Device":
        """The machine's processor."""
        return cls("cpu", _processor(), _memory())

    @classmethod
    def detect(cls) -> "Device":
        """The current CUDA device if torch can use one, else the CPU.

        A torch built without CUDA and a machine without a driver are told apart from a
        GPU without creating a CUDA context.
        """
        import torch

        if torch.version.cuda is None or not torch.cuda.is_available():
            return cls.cpu()
        # Any: torch's stubs lack shared_memory_per_block_optin.
        found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(
            "cuda",
            found.name,
            found.total_memory,
            (found.major, found.minor),
            found.multi_processor_count,
            found.L2_cache_size,
            found.shared_memory_per_block_optin,
        )

    def describe(self) -> str:
        """One line for people."""
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        if self.capability is None:
            return f"{self.name}, {memory}"
        major, minor = self.capability
        return (
            f"{self.name}, sm_{major}{minor}, {self.sms} SMs, "
            f"{self.l2_bytes / 2**20:.0f} MiB L2, {memory}"
        )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 0
