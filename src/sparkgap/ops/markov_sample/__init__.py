# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""markov_sample: draft tokens left to right, each biased by the one before it."""

from sparkgap.ops.markov_sample.reference import (
    MarkovDraft,
    Numerics,
    Sampling,
    best_in_shard,
    markov_bias,
    markov_sample,
    merge_shards,
)

__all__ = [
    "MarkovDraft",
    "Numerics",
    "Sampling",
    "best_in_shard",
    "markov_bias",
    "markov_sample",
    "merge_shards",
]
