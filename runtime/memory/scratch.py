"""What the forward pass allocates and frees again: the arrays that live at once where it takes most.

A function per step of a layer, each with the list of arrays that the step in `runtime.models` makes for T tokens at
once. All counts are of f32 elements unless a name ends in `_bytes`; i64 elements count twice.
"""

from __future__ import annotations

from container.layout import TILE_ROWS, VEC_DIM, ExpertQuant
from container.model import ModelConfig

F32_BYTES = 4
# How much the forward pass takes at a time. Of a matrix so many rows are unpacked: BLAS is near its best from there on;
BLOCK_ROWS = 512
BLOCK_ELEMENTS = 4 << 20  # but no more than this, unless a tile of rows has more.
# Unpacked rows lie this much further apart than they are long: a power of two apart they would share cache lines.
ROW_GAP = 16
BLOCK_TOKENS = 16  # of delta attention
TILE_QUERIES = 128  # of one head of latent attention
BLOCK_POSITIONS = 512


def scratch_bytes(model: ModelConfig, quant: ExpertQuant, *, chunk: int, n_threads: int) -> int:
    """Most bytes of temporary arrays at once while up to `chunk` tokens at a time are taken on `n_threads` threads."""
    steps = [_kda(model, chunk), _mla(model, chunk, n_threads), _moe(model, chunk), _dense(model, chunk)]
    elements = _stream(model, chunk) + max(steps) + _tables(model, quant) + 3 * model.vocab_size
    if chunk > 1:
        elements += n_threads * _blocks(model, chunk)
    return F32_BYTES * elements


def block_rows(width: int) -> int:
    """Rows of a matrix of `width` columns that one thread unpacks at a time: whole tiles."""
    fitting = BLOCK_ELEMENTS // max(width, 1) // TILE_ROWS * TILE_ROWS
    return max(TILE_ROWS, min(BLOCK_ROWS, fitting))


def _stream(model: ModelConfig, tokens: int) -> int:
    """Sums put aside, the running one; what a sublayer reads, its norm, and the sublayer's output: [T, hidden] each."""
    aside = 0 if model.attn_res_block_size is None else -(-model.n_layers // model.attn_res_block_size)
    return tokens * model.hidden_size * (aside + 4)


def _kda(model: ModelConfig, tokens: int) -> int:
    """Gate, log decay, q, k, v, output, and one projection before its convolution, [T, width]; and blocks of heads."""
    kda = model.kda
    per_block = BLOCK_TOKENS * (8 * kda.head_dim + 3 * BLOCK_TOKENS) + 3 * kda.head_dim**2
    return tokens * (7 * kda.width + 2 * (kda.n_heads + kda.head_dim)) + kda.n_heads * per_block


def _mla(model: ModelConfig, tokens: int, n_threads: int) -> int:
    """The latents, their norm; queries, values, their gate [T, heads · size]; and per thread a tile of a head."""
    mla = model.mla
    width = mla.kv_lora_rank + mla.qk_rope_head_dim
    per_token = 3 * width + mla.n_heads * (mla.qk_head_dim + 3 * mla.v_head_dim) + 2 * (mla.q_lora_rank or 0)
    per_tile = 2 * width + 3 * mla.kv_lora_rank + 2 * BLOCK_POSITIONS
    n_tiles = mla.n_heads if tokens == 1 else n_threads * min(tokens, TILE_QUERIES)
    return tokens * per_token + n_tiles * per_tile


def _dense(model: ModelConfig, tokens: int) -> int:
    """gate and up [T, inner]; their product takes the place of gate."""
    return 2 * tokens * model.intermediate_size


def _moe(model: ModelConfig, tokens: int) -> int:
    """The router's choice; then the shared expert; then, beside its output, one expert that all tokens chose.

    A thread keeps what it worked on until it gets other work, so an expert's arrays count twice.
    """
    moe = model.moe
    router = 6 * moe.n_experts
    shared = 2 * moe.n_shared_experts * moe.intermediate_size
    routed = model.hidden_size + 5 * model.expert_width + 2 * moe.intermediate_size + 8 * moe.top_k
    leaving = 2 * model.hidden_size + 3 * model.expert_width
    return tokens * max(router, shared, routed, leaving)


def _tables(model: ModelConfig, quant: ExpertQuant) -> int:
    """Products of one token with all codebook entries for gate and up, a layer's last ones too; and of each expert the
    same for down, gate and up and their product, its output twice.
    """
    moe = model.moe
    inputs = 4 * model.expert_width + moe.top_k * moe.intermediate_size
    per_expert = 3 * moe.intermediate_size + 2 * model.expert_width
    return quant.n_stages * quant.n_entries * inputs // VEC_DIM + moe.top_k * per_expert


def _blocks(model: ModelConfig, tokens: int) -> int:
    """What a thread keeps for unpacked rows, and for what a block of an expert's rows makes of all tokens."""
    mla, moe = model.mla, model.moe
    widths = [
        *(model.hidden_size, model.intermediate_size, model.kda.width, mla.n_heads * mla.v_head_dim),
        *(moe.n_shared_experts * moe.intermediate_size, mla.q_lora_rank or 0, moe.intermediate_size),
    ]
    unpacked = max(block_rows(width) * (width + ROW_GAP) for width in widths)
    return unpacked + 2 * BLOCK_ROWS * tokens
