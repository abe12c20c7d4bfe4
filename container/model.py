"""The model a container holds: its shape in one spelling, read from the manifest's `config`.

`canonical_config` turns a release's config.json into the manifest's `config` (docs/FORMAT.md: one spelling for
the MoE keys, a multimodal wrapper moved under `_outer`). `ModelConfig` is the typed view of that dictionary
that the converter, the runtime and the reference share; none of them reads config keys by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from container.config_keys import ConfigKeys
from container.errors import ConfigError, shown
from container.layout import EXPERT_QUANTS, MAX_U16

# canonical key -> spellings found in releases of the family
MOE_ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_shared_experts": ("n_shared_experts",),
}

# Flags that readers test for by presence, whatever the value: a canonical config has them only when true.
PRESENCE_FLAGS = ("moe_renormalize", "mla_use_output_gate", "latent_moe_use_norm")
LINEAR_PRESENCE_FLAGS = ("use_full_rank_gate",)  # inside linear_attn_config

KINDS = ("gate", "up", "down")

# The release and transformers build these two norms without passing rms_norm_eps, so the class default holds
# (docs/MODELS.md 3.1 and 3.10); other engines use rms_norm_eps.
LATENT_NORM_EPS = 1e-6
# fla adds it to the sum of squares under the root (docs/MODELS.md 3.2)
L2_NORM_EPS = 1e-6

# Codebook ids are u16 and every layer may need its own.
MAX_LAYERS = (MAX_U16 + 1) // max(quant.n_codebooks for quant in EXPERT_QUANTS.values())


@dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi delta attention."""

    n_heads: int
    head_dim: int
    conv_kernel: int
    full_rank_gate: bool  # g_proj (K3) instead of g_a_proj and g_b_proj (Kimi-Linear)
    gate_lower_bound: float | None  # K3: -5.0; None: the softplus gate of Kimi-Linear
    layers: frozenset[int]  # 0-based

    @property
    def width(self) -> int:
        """Channels of q, k and v: heads times head size."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention without rotation (NoPE)."""

    n_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # called rope in the config, never rotated
    v_head_dim: int
    output_gate: bool

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Router and experts."""

    n_experts: int
    top_k: int
    n_shared_experts: int
    intermediate_size: int
    first_dense: int  # layers before this one have a plain MLP
    routed_scaling_factor: float
    renormalize: bool
    n_groups: int
    topk_groups: int
    latent_size: int | None  # routed_expert_hidden_size: experts work in this width (K3)
    latent_norm: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one Kimi-family text model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    n_layers: int
    rms_norm_eps: float
    hidden_act: str  # "silu" or "situ"
    situ_beta: float
    situ_linear_beta: float | None
    attn_res_block_size: int | None  # None: ordinary residual stream
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig

    def is_kda(self, layer: int) -> bool:
        """True where `layer` (0-based) has delta attention; else it has latent attention."""
        return layer in self.kda.layers

    def is_moe(self, layer: int) -> bool:
        """True where `layer` (0-based) has routed experts; else it has a dense MLP."""
        return layer >= self.moe.first_dense

    @property
    def moe_layers(self) -> range:
        """0-based layers with routed experts."""
        return range(self.moe.first_dense, self.n_layers)

    @property
    def expert_width(self) -> int:
        """Width of the vectors that enter and leave a routed expert."""
        return self.moe.latent_size or self.hidden_size

    @property
    def expert_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape (rows, cols) of each expert matrix, by kind, in record order."""
        inner, outer = self.moe.intermediate_size, self.expert_width
        return {"gate": (inner, outer), "up": (inner, outer), "down": (outer, inner)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a canonical config (see `canonical_config`).

        Raises ConfigError that names the key when one is missing, has a wrong type or value, or asks for
        something this project does not implement.
        """
        keys = ConfigKeys(config)
        n_layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
        _refuse_unsupported(config)
        linear_beta = keys.optional_number("activation_situ_linear_beta")
        tolerance = keys.number("rms_norm_eps")
        if tolerance <= 0:
            raise ConfigError(f"config: `rms_norm_eps` must be above 0, found {tolerance}")
        return cls(
            vocab_size=keys.count("vocab_size"),
            hidden_size=keys.count("hidden_size"),
            intermediate_size=keys.count("intermediate_size"),
            n_layers=n_layers,
            rms_norm_eps=tolerance,
            hidden_act=str(config["hidden_act"]),
            situ_beta=keys.optional_number("activation_situ_beta") or 1.0,
            situ_linear_beta=None if linear_beta is None else (linear_beta or 1.0),
            attn_res_block_size=keys.count("attn_res_block_size", 0, least=0) or None,
            kda=_kda(keys, n_layers),
            mla=_mla(keys),
            moe=_moe(keys, n_layers),
        )


def canonical_config(release: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's `config` for a release's config.json (docs/FORMAT.md, Manifest keys).

    A multimodal wrapper's `text_config` becomes the config and the rest of the wrapper goes under `_outer`.
    MoE keys get the canonical spelling beside the original one. Flags that readers test for by presence are left out
    when they are false or null. Raises ConfigError when `text_config` is no object.
    """
    if "text_config" in release:
        text = release["text_config"]
        if not isinstance(text, Mapping):
            raise ConfigError("config.json: `text_config` is not an object")
        config = dict(text)
        config["_outer"] = {key: value for key, value in release.items() if key != "text_config"}
    else:
        config = dict(release)
    for canonical, spellings in MOE_ALIASES.items():
        for spelling in spellings:
            if canonical not in config and spelling in config:
                config[canonical] = config[spelling]
    if config.get("moe_renormalize") is None and config.get("norm_topk_prob"):
        config["moe_renormalize"] = True
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        config["linear_attn_config"] = _without_false(linear, LINEAR_PRESENCE_FLAGS)
    return _without_false(config, PRESENCE_FLAGS)


def _without_false(config: Mapping[str, Any], flags: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in flags or value not in (False, None)}


def _kda(keys: ConfigKeys, n_layers: int) -> KdaConfig:
    linear = keys.section("linear_attn_config")
    listed = linear.get("kda_layers")
    full = linear.config.get("full_attn_layers")
    for key, layers in (("kda_layers", listed), ("full_attn_layers", [] if full is None else full)):
        if not isinstance(layers, list) or not all(type(n) is int and 1 <= n <= n_layers for n in layers):
            raise ConfigError(f"config: `linear_attn_config.{key}` must list layers from 1 to {n_layers}")
    if full is not None and sorted([*listed, *full]) != list(range(1, n_layers + 1)):
        raise ConfigError(
            "config: `linear_attn_config` must name each layer once, in `kda_layers` or `full_attn_layers` (1-based)"
        )
    bound = linear.optional_number("gate_lower_bound")
    if bound is not None and bound >= 0:
        raise ConfigError(
            f"config: `linear_attn_config.gate_lower_bound` must be below 0, found {bound}: no state decays"
        )
    return KdaConfig(
        n_heads=linear.count("num_heads"),
        head_dim=linear.count("head_dim"),
        conv_kernel=linear.count("short_conv_kernel_size"),
        full_rank_gate=linear.flag("use_full_rank_gate"),
        gate_lower_bound=bound,
        layers=frozenset(n - 1 for n in listed),
    )


def _mla(keys: ConfigKeys) -> MlaConfig:
    rank = keys.config.get("q_lora_rank")
    return MlaConfig(
        n_heads=keys.count("num_attention_heads"),
        q_lora_rank=None if rank is None else keys.count("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
        output_gate=keys.flag("mla_use_output_gate"),
    )


def _moe(keys: ConfigKeys, n_layers: int) -> MoeConfig:
    latent = keys.config.get("routed_expert_hidden_size")
    moe = MoeConfig(
        n_experts=keys.count("num_experts", most=MAX_U16),
        top_k=keys.count("num_experts_per_token"),
        n_shared_experts=keys.count("num_shared_experts", 0, least=0),
        intermediate_size=keys.count("moe_intermediate_size"),
        first_dense=keys.count("first_k_dense_replace", 0, least=0),
        routed_scaling_factor=keys.number("routed_scaling_factor", 1.0),
        renormalize="moe_renormalize" in keys.config,
        n_groups=keys.count("num_expert_group", 1),
        topk_groups=keys.count("topk_group", 1),
        latent_size=None if latent is None else keys.count("routed_expert_hidden_size"),
        latent_norm=keys.flag("latent_moe_use_norm"),
    )
    if moe.first_dense > n_layers:
        raise ConfigError(f"config: `first_k_dense_replace` {moe.first_dense} is above num_hidden_layers {n_layers}")
    if moe.top_k > moe.n_experts:
        raise ConfigError(f"config: `num_experts_per_token` {moe.top_k} is above num_experts {moe.n_experts}")
    if moe.n_experts % moe.n_groups or moe.topk_groups > moe.n_groups:
        raise ConfigError(
            f"config: {moe.n_experts} experts cannot form {moe.n_groups} groups of which {moe.topk_groups} are kept"
        )
    kept = moe.n_experts // moe.n_groups * moe.topk_groups
    if moe.top_k > kept:
        raise ConfigError(f"config: `num_experts_per_token` {moe.top_k} is above the {kept} experts of the kept groups")
    return moe


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Settings that would change the forward pass and that nothing here implements."""
    required: dict[str, tuple[Any, ...]] = {
        "mla_use_nope": (True,),
        "hidden_act": ("silu", "situ"),
        "moe_router_activation_func": (None, "sigmoid"),
        "tie_word_embeddings": (None, False),
        "moe_layer_freq": (None, 1),
        "num_nextn_predict_layers": (None, 0),
    }
    for key, allowed in required.items():
        if config.get(key) not in allowed:
            wanted = " or ".join(repr(value) for value in allowed if value is not None)
            raise ConfigError(f"config: `{key}` is {shown(config.get(key))}; only {wanted} is supported")
