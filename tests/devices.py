# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Devices that need not be there: what the planner is tested with."""

from sparkgap.device import Device

CPU = Device("cpu", "a processor", 16 << 30)
A100 = Device("cuda", "NVIDIA A100", 80 << 30, (8, 0), 108, 40 << 20, 166912)
H200 = Device("cuda", "NVIDIA H200", 141 << 30, (9, 0), 132, 60 << 20, 232448)
