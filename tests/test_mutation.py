# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The tests catch what they are there to catch: eight seeded faults, each found."""

import pytest

from mutation import FAULTS

PAIRS = [(fault, check) for fault, entry in FAULTS.items() for check in entry.checks]


@pytest.mark.parametrize(("fault", "check"), PAIRS)
def test_the_check_passes_without_the_fault(fault, check):
    FAULTS[fault].checks[check]()


@pytest.mark.parametrize(("fault", "check"), PAIRS)
def test_the_check_fails_with_the_fault(fault, check, monkeypatch):
    FAULTS[fault].inject(monkeypatch)
    with pytest.raises(AssertionError):
        FAULTS[fault].checks[check]()
