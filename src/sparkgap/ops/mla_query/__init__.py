# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""mla_query: block hidden states → absorbed, rotated queries and their latent rows."""

from sparkgap.ops.mla_query.reference import QueryWeights, mla_query

__all__ = ["QueryWeights", "mla_query"]
