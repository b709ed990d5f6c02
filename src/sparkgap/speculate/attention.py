# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Grouped-query attention on CPU without copying the cache.

Under a mask (a verification pass over a cache needs one) transformers' sdpa path first
repeats keys and values to one per query head, because GPU kernels want that. torch's
CPU kernel reads grouped heads as they are, with the same bits: 1 ms less of 30 layers'
1.9 at 200 rows, 6 less of 10.6 at 1000. Everything else is left to transformers.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

NAME = "sparkgap_grouped"


def use_grouped_attention(model: Any) -> None:
    """Switch a CPU model that runs transformers' "sdpa" to the grouped form of it."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [1, H, n, D], key and value [1, Hkv, S, D] → [1, n, H, D]."""
    plain = all(options.get(name) is None for name in ("position_bias", "softcap"))
    if attention_mask is None or not plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return out
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=options.get("scaling"),
        enable_gqa=True,
    )
    return attended.transpose(1, 2).contiguous(), None
