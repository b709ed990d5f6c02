# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Sparkgap: DSpark drafting for speculative decoding.

    Drafter, DraftBatch, Draft    the engine-free drafter
    DraftConfig                   geometry and rules of a draft
    step, Buffers                 one whole step over buffers that an engine lends
    SparkgapError, InputError     what goes wrong on purpose

The names that need torch are imported when they are first used: importing this package
alone reads no heavy package and touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sparkgap.errors import InputError, SparkgapError
from sparkgap.version import __version__

if TYPE_CHECKING:
    from sparkgap.config import DraftConfig
    from sparkgap.drafter import DraftBatch, Drafter
    from sparkgap.model import Buffers, Draft, step

__all__ = [
    "Buffers",
    "Draft",
    "DraftBatch",
    "DraftConfig",
    "Drafter",
    "InputError",
    "SparkgapError",
    "__version__",
    "step",
]

_HOMES = {
    "Buffers": "model",
    "Draft": "model",
    "DraftBatch": "drafter",
    "DraftConfig": "config",
    "Drafter": "drafter",
    "step": "model",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # so that this function is asked once per name
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
