# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The distillation loss, and its gradient without keeping the logits.

For a draft distribution p and the target's q over V tokens, a row costs

    ce_weight * -Σ q log p  +  tv_weight * ½ Σ |p - q|

(arXiv 2607.05147: cross-entropy 0.1, total variation 0.9; 1 - TV is the chance that
rejection sampling accepts). A batch has tens of thousands of rows and V = 49152, so the
logits of all rows at once would be gigabytes, several times over. `distill` walks
chunks of rows and forms the gradient there and then; `row_losses` is the definition it
is tested against.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# 4096 rows of 49152 fp32 logits are 0.8 GB; a few such tensors live at a time.
CHUNK = 4096


@dataclass(frozen=True)
class Weights:
    """Weight of the cross-entropy and of the total variation."""

    ce: float
    tv: float


def row_losses(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [N, V] of both → cross-entropy [N], total variation [N]."""
    log_p, log_q = draft.log_softmax(-1), target.log_softmax(-1)
    q = log_q.exp()
    return -(q * log_p).sum(-1), 0.5 * (log_p.exp() - q).abs().sum(-1)


def _chunk(
    draft: Tensor, target: Tensor, rows: Tensor, ce_weight: Tensor, tv_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n] twice, and the gradient [n, V] of Σ rows * (ce, tv) by draft logits.

    d CE = p - q. d TV = ½ p (s - Σ s p) with s = sign(p - q).
    """
    log_p, log_q = draft.log_softmax(-1), target.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    gap = p - q
    sign = gap.sign()
    ce = -(q * log_p).sum(-1)
    tv = 0.5 * gap.abs().sum(-1)
    mean = (sign * p).sum(-1, keepdim=True)
    grad = ce_weight * gap + tv_weight * 0.5 * p * (sign - mean)
    return ce, tv, grad * rows[:, None]


class _Distill(torch.autograd.Function):
    """Forward computes the gradients; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        extra: Tensor,
        extra_head: Tensor,
        frozen: "Frozen",
        row_weights: Tensor,
        weights: Weights,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ce_weight = hidden.new_tensor(weights.ce)
        tv_weight = hidden.new_tensor(weights.tv)
        grad_hidden, grad_extra = torch.empty_like(hidden), torch.empty_like(extra)
        grad_head = torch.zeros_like(extra_head)
        ces, tvs = [], []
        chunk = _compiled_chunk() if hidden.is_cuda else _chunk
        # Equal chunks, so that the compiled kernel sees one shape.
        size = -(-len(hidden) // max(1, -(-len(hidden) // CHUNK)))
        for at in range(0, len(hidden), max(1, size)):
            part = slice(at, at + size)
            draft = hidden[part] @ frozen.lm_head.T
            draft.addmm_(extra[part], extra_head.T)
            target = frozen.target_hidden[part] @ frozen.lm_head.T
            ce, tv, grad = chunk(draft, target, row_weights[part], ce_weight, tv_weight)
            del draft, target
            grad_hidden[part] = grad @ frozen.lm_head
            grad_extra[part] = grad @ extra_head
            grad_head.addmm_(grad.T, extra[part])
            ces.append(ce)
            tvs.append(tv)
        ctx.save_for_backward(grad_hidden, grad_extra, grad_head)
        ce, tv = torch.cat(ces), torch.cat(tvs)
        ctx.mark_non_differentiable(ce, tv)
        loss = ((weights.ce * ce + weights.tv * tv) * row_weights).sum()
        return loss, ce, tv

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, extra, head = ctx.saved_tensors
        scale = grads[0]
        return hidden * scale, extra * scale, head * scale, None, None, None


@dataclass(frozen=True)
class Frozen:
    """The target's side: lm_head [V, d] and its final hidden states [N, d]."""

    lm_head: Tensor
    target_hidden: Tensor


def distill(
    hidden: Tensor,
    extra: Tensor,
    extra_head: Tensor,
    frozen: Frozen,
    row_weights: Tensor,
    weights: Weights,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits are hidden [N, d] · lm_headᵀ + extra [N, r] · extra_head [V, r]ᵀ.

    Returns Σ row_weights [N] * (ce, tv), differentiable by hidden, extra, extra_head,
    then the unweighted cross-entropy [N] and total variation [N], detached.
    """
    out: tuple[Tensor, Tensor, Tensor] = _Distill.apply(  # type: ignore[no-untyped-call]
        hidden, extra, extra_head, frozen, row_weights, weights
    )
    return out


_compiled: Any = None


def _compiled_chunk() -> Any:
    """`_chunk` fused by torch.compile: 20 passes over the logits become about 5."""
    global _compiled  # noqa: PLW0603 - compiled once a process
    if _compiled is None:
        _compiled = torch.compile(_chunk)
    return _compiled
