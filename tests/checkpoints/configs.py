"""config.json of the two released shapes in small numbers: same keys, same nesting, same kinds of layers."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from tests.checkpoints.tokenizer import BOS_ID, END_OF_TURN_ID, MEDIA_PAD_ID, N_TOKENS, PAD_ID

_TOKEN_IDS: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": END_OF_TURN_ID, "pad_token_id": PAD_ID}

# Keywords that give `k3_config` the shapes of the released text model (docs/MODELS.md 1.2).
K3_DIMENSIONS: dict[str, Any] = {
    "num_hidden_layers": 93,
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "intermediate_size": 33_792,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "attn_res_block_size": 12,
    "linear_attn_config": {"num_heads": 96, "head_dim": 128},
}

# Defaults of the library that wrote K3's config.json; none of them touches the forward pass. They are here
# because some look as if they did: `top_k` is not the router's, `max_length` is not the context.
_SERIALISED_DEFAULTS: dict[str, Any] = json.loads("""{
    "_name_or_path": "", "add_cross_attention": false, "bad_words_ids": null, "begin_suppress_tokens": null,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": null, "decoder_start_token_id": null,
    "diversity_penalty": 0.0, "do_sample": false, "early_stopping": false, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": null, "finetuning_task": null, "forced_bos_token_id": null,
    "forced_eos_token_id": null, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": false,
    "is_encoder_decoder": false, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": false, "output_hidden_states": false, "output_scores": false, "prefix": null,
    "problem_type": null, "pruned_heads": {}, "remove_invalid_values": false, "repetition_penalty": 1.0,
    "return_dict": true, "return_dict_in_generate": false, "sep_token_id": null, "suppress_tokens": null,
    "task_specific_params": null, "temperature": 1.0, "tf_legacy_loss": false, "tie_encoder_decoder": false,
    "tokenizer_class": null, "top_k": 50, "top_p": 1.0, "torchscript": false, "typical_p": 1.0,
    "use_bfloat16": false
}""")

_MXFP4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    # names neither routed_expert_{down,up}_proj nor the *_res_proj, although they are plain in the release
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

# Attention and experts of both shapes. moe_intermediate_size is no multiple of the 64-row index tile on purpose.
_SMALL: dict[str, Any] = {
    "vocab_size": N_TOKENS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 96,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "first_k_dense_replace": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
}


def k3_config(**overrides: Any) -> dict[str, Any]:
    """A Kimi K3 config.json: 6 layers, of which layers 3 and 5 (0-based) have latent attention.

    An override replaces a key of `text_config`; `linear_attn_config` and `vision_config` are merged into the
    defaults key by key; `quantization_config=None` describes a release with plain bf16 experts. The lists of
    attention layers follow `num_hidden_layers`: every fourth and the last, unless given.
    """
    vision = _VISION | {"text_hidden_size": overrides.get("hidden_size", _SMALL["hidden_size"])}
    vision |= overrides.pop("vision_config", {})
    text = _SERIALISED_DEFAULTS | _SMALL | _K3_TEXT | _TOKEN_IDS
    text = _overridden(text, overrides, use_full_rank_gate=True, gate_lower_bound=-5.0)
    if text["quantization_config"] is None:
        del text["quantization_config"]
    model = "modeling_kimi_k3.KimiK3ForConditionalGeneration"
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": model,
            "AutoModelForCausalLM": model,
        },
        **_TOKEN_IDS,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": MEDIA_PAD_ID,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": deepcopy(vision),
    }


def kimi_linear_config(**overrides: Any) -> dict[str, Any]:
    """A Kimi-Linear config.json: 5 layers, of which layers 3 and 4 (0-based) have latent attention.

    Overrides work as in `k3_config`; there is no wrapper, no vision tower and no quantisation.
    """
    return _overridden(_SMALL | _TOKEN_IDS | _KIMI_LINEAR, overrides)


_K3_TEXT: dict[str, Any] = {
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
        "AutoModel": "modeling_kimi_linear.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
    },
    "quantization_config": _MXFP4,
    "num_hidden_layers": 6,
    "q_lora_rank": 96,
    "mla_use_output_gate": True,
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 128,
    "latent_moe_use_norm": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "attn_res_block_size": 2,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "max_position_embeddings": 1048576,
    "transformers_version": "4.56.2",
}

_KIMI_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 5,
    "head_dim": 64,
    "q_lora_rank": None,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "hidden_act": "silu",
    "model_max_length": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}

# 128 x 3 x 14 x 14 makes the patch convolution large enough to be quantised, with rows that are no whole
# number of 128-weight groups.
_VISION: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 8,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 8,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 128,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "qkv_hidden_size": 192,
    "vt_hidden_size": 128,
    "vt_intermediate_size": 256,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2,
}


def _overridden(text: dict[str, Any], overrides: dict[str, Any], **linear_extra: Any) -> dict[str, Any]:
    """`text` with the overrides applied and its `linear_attn_config` filled in (1-based layer lists)."""
    linear_overrides = overrides.pop("linear_attn_config", {})
    text = text | overrides
    n_layers = text["num_hidden_layers"]
    full = linear_overrides.get("full_attn_layers", sorted({*range(4, n_layers + 1, 4), n_layers}))
    linear = {
        "num_heads": 4,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        **linear_extra,
        "full_attn_layers": full,
        "kda_layers": [number for number in range(1, n_layers + 1) if number not in full],
    }
    # a copy, so that a test may change what it gets
    return deepcopy(text | {"linear_attn_config": linear | linear_overrides})
