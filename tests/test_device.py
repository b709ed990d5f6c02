# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Device: detection with and without a GPU, and what stays untouched meanwhile."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from devices import CPU, H200
from sparkgap.device import Device

PROPERTIES = SimpleNamespace(
    name=H200.name,
    total_memory=H200.memory_bytes,
    major=9,
    minor=0,
    multi_processor_count=H200.sms,
    L2_cache_size=H200.l2_bytes,
    shared_memory_per_block_optin=H200.shared_bytes,
)


def test_cpu_is_named_and_sized():
    found = Device.cpu()
    assert found.kind == "cpu"
    assert found.name
    assert found.memory_bytes > 0
    assert found.capability is None


def test_a_torch_without_cuda_is_not_asked_for_devices(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)

    def forbidden():
        raise AssertionError("asked for a CUDA device")

    monkeypatch.setattr(torch.cuda, "is_available", forbidden)
    monkeypatch.setattr(torch.cuda, "current_device", forbidden)
    assert Device.detect().kind == "cpu"


def test_no_gpu_creates_no_cuda_context(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: pytest.fail("touched CUDA")
    )
    assert Device.detect() == Device.cpu()


def test_a_gpu_is_read_as_plain_values(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: PROPERTIES)
    assert Device.detect() == H200


def test_a_device_is_described_in_one_line():
    assert H200.describe() == "NVIDIA H200, sm_90, 132 SMs, 60 MiB L2, 141 GiB"
    assert CPU.describe() == "a processor, 16 GiB"


def test_importing_the_module_imports_no_torch():
    code = "import sys, sparkgap.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
