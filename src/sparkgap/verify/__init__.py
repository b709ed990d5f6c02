# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Comparing a result with what it should be: derived bounds, and where it is off."""
