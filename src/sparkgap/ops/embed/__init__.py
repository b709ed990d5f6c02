# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""embed: token ids [T] → rows [T, d] of the embedding table [V, d], copied exactly."""

from sparkgap.ops.embed.reference import embed

__all__ = ["embed"]
