# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""What a result needs beside it to be made again: command, commit, versions, CPU."""

import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkgap.device import Device
from sparkgap.version import __version__

PACKAGES = ("torch", "transformers", "safetensors", "triton", "vllm", "sparkgap-demo")


def provenance() -> dict[str, Any]:
    """One flat record; commit and dirty are None outside a git tree."""
    import torch

    commit, dirty = source_state()
    device = Device.detect()
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "sparkgap": __version__,
        "python": platform.python_version(),
        **versions(),
        "device": device.describe(),
        "cpu": Device.cpu().name,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str | None]:
    """Installed version of each package that a result may depend on; None = absent."""
    return {name: version(name) for name in PACKAGES}


def version(package: str) -> str | None:
    """Installed version of a package, None without it; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_state() -> tuple[str | None, bool | None]:
    """Commit of the tree that this package runs from, and whether it was edited."""
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None  # installed somewhere below an unrelated repository
    commit = _git(here, "rev-parse", "HEAD")
    changes = _git(here, "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def digest(folder: Path) -> str:
    """SHA-256 over a checkpoint's safetensors files, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
