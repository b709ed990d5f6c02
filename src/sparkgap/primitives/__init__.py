# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Pieces that two or more ops share: rotary tables, the noise rule, softmax merging."""
