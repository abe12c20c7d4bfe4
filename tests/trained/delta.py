"""The gated delta rule by pieces of 16 tokens: the same as `validate.reference.kda.delta_recurrence`, much faster.

Within a piece that starts with state S, with G the running sum of the log decays g (Kimi Linear, arXiv 2510.26692):

    A[i, j] = β_i · (k_i ⊙ exp(G_i - G_j)) · k_j  for j < i
    U = (1 + A)⁻¹ · β(V - (K ⊙ exp G) S)            what each token adds, before its key
    o_i = Sᵀ(q_i ⊙ exp G_i) + Σ_{j ≤ i} ((q_i ⊙ exp(G_i - G_j)) · k_j) u_j
    S ← diag(exp G_16) S + Σ_j (k_j ⊙ exp(G_16 - G_j)) u_jᵀ
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(G_i - G_j) is split into exp(G_i) · exp(-G_j); with g above -5 neither leaves f32's range within 16 tokens.
PIECE = 16
DOUBLINGS = 4  # A¹⁶ = 0


def delta_by_pieces(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """As `delta_recurrence`: q, k, v, g [T, heads, dim] and beta [T, heads] to outputs and the last state.

    T must be a multiple of PIECE and no g below -5. In f32 it differs from the recurrence by rounding only.
    """
    n_tokens, n_heads, dim = k.shape
    q, k, v, g = (_pieces(x) for x in (q, k, v, g))  # [pieces, heads, PIECE, dim]
    beta = _pieces(beta[:, :, None])
    total = g.cumsum(2)
    grown, shrunk = torch.exp(total), torch.exp(-total)
    keys = k * shrunk
    last = total[:, :, -1:]
    solve = _inverse((beta * ((k * grown) @ keys.mT)).tril(-1))
    added = solve @ (beta * v)
    taken = solve @ (beta * k * grown)
    queries = q * grown
    within = (queries @ keys.mT).tril()
    kept, stored = torch.exp(last).mT, (k * torch.exp(last - total)).mT
    state = v.new_zeros(n_heads, dim, v.shape[3])
    outputs = []
    # unbind, not indexing: the gradient of an index is a tensor of zeros as large as the whole
    for plus, minus, query, share, keep, store in zip(
        *(part.unbind() for part in (added, taken, queries, within, kept, stored)), strict=True
    ):
        updates = plus - minus @ state
        outputs.append(query @ state + share @ updates)
        state = keep * state + store @ updates
    return torch.stack(outputs).transpose(1, 2).reshape(n_tokens, n_heads, v.shape[3]), state


def _pieces(x: Tensor) -> Tensor:
    return x.reshape(-1, PIECE, *x.shape[1:]).transpose(1, 2)


def _inverse(strictly_lower: Tensor) -> Tensor:
    """(1 + A)⁻¹ of strictly lower triangular A [..., PIECE, PIECE]: (1 - A)(1 + A²)(1 + A⁴)(1 + A⁸)."""
    one = torch.eye(PIECE, dtype=strictly_lower.dtype)
    inverse, power = one - strictly_lower, strictly_lower
    for _ in range(DOUBLINGS - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse
