# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""context_kv: context features → the latent rows of every draft layer.

Context enters a draft layer through its keys and values only, so all layers' rows are
known before the first layer runs: one GEMM over the stacked [L * (kv_rank + rope), d].
"""

from sparkgap.ops.context_kv.reference import context_kv

__all__ = ["context_kv"]
