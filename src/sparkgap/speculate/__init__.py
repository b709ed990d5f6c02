# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The engine-free loop: a target with taps, verification, and `generate`.

default_target.py  the target that needs no model hub, and the export of any target
target.py          a Hugging Face causal model: forward with taps, cache with crop
verify.py          which drafts to keep: greedy match, standard and block rejection
generate.py        the loop, plain decoding beside it, and what is counted
"""

from sparkgap.speculate.default_target import export_target
from sparkgap.speculate.generate import Round, Statistics, decode_plain, generate
from sparkgap.speculate.target import Target

__all__ = [
    "Round",
    "Statistics",
    "Target",
    "decode_plain",
    "export_target",
    "generate",
]
