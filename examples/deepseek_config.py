"""What a DeepSeek `config.json` says, as nested dataclasses: V2 and V3, as published or as transformers writes it.

Reading is strict. A key that changes the forward pass and is not implemented here, or that nobody here has heard of, is
an error that names it: a model that silently differs from its checkpoint is worse than one that does not load.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """The folder does not hold a model that can be loaded; the message says which file, key or tensor, and why."""


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0 stands for "not given", as in transformers
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    dim: int
    theta: float
    interleave: bool  # pairs are (x0, x1), (x2, x3), …; otherwise (x0, x[dim / 2]), …
    yarn: YarnConfig | None


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    bias: bool
    rope: RopeConfig

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.rope.dim

    @property
    def cache_dim(self) -> int:
        """Elements that one token takes in the KV cache: its latent, then its rotated key."""
        return self.kv_lora_rank + self.rope.dim

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(qk_head_dim), times the square of yarn's magnitude correction."""
        yarn = self.rope.yarn
        magnitude = yarn_magnitude(yarn.factor, yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
        return self.qk_head_dim**-0.5 * magnitude**2


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    sigmoid: bool  # V3: sigmoid scores and a learned correction of the choice; V2: softmax scores
    num_groups: int  # 1: every expert may be chosen
    topk_groups: int
    normalize: bool
    routed_scaling_factor: float


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_dense_layers: int  # the first layers, whose MLP is not a mixture
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str  # of the stored weights: "bfloat16", "float16" or "float32"
    eos_token_ids: tuple[int, ...]
    attention: AttentionConfig
    moe: MoEConfig | None


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Equation 22 of the YaRN paper (arXiv 2309.00071), with DeepSeek's weight `mscale` on the logarithm."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


# Keys that exist in published configurations and are served only with these values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "quantization_config": (None,),
    "moe_layer_freq": (None, 1),
    "pretraining_tp": (None, 1),
    "ep_size": (None, 1),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1.0),
}
# Keys that do not change what inference computes.
_IRRELEVANT = frozenset(
    "architectures auto_map model_type transformers_version _name_or_path _attn_implementation use_cache "
    "attention_dropout initializer_range aux_loss_alpha seq_aux router_aux_loss_coef output_router_logits "
    "output_attentions output_hidden_states return_dict num_nextn_predict_layers bos_token_id pad_token_id "
    "unk_token_id chunk_size_feed_forward is_encoder_decoder is_decoder id2label label2id problem_type".split()
)


class _Reader:
    """Takes keys out of a JSON object, and knows at the end which were never asked for. null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where, self.seen = values, where, set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str, kind: type = int) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.where} has no {key!r}, which the model cannot do without")
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.where}: {key!r} must be of type {kind.__name__}, got {value!r}")
        if kind is int and value < 1:
            raise CheckpointError(f"{self.where}: {key!r} must be at least 1, got {value}")
        return value

    def fixed(self, key: str, allowed: tuple[Any, ...]) -> None:
        self.seen.add(key)
        if self.values.get(key) not in allowed:
            raise CheckpointError(
                f"{self.where}: {key!r} is {self.values[key]!r}; only {', '.join(map(repr, allowed))} supported here"
            )

    def finish(self) -> None:
        unknown = sorted(set(self.values) - self.seen)
        if unknown:
            raise CheckpointError(
                f"{self.where}: {', '.join(map(repr, unknown))} not known to this model, which therefore cannot tell "
                "whether it computes what the checkpoint means; remove what does not matter"
            )


def read_config(folder: Path) -> DeepSeekConfig:
    """The configuration in `folder/config.json`; CheckpointError if it is missing or asks for what is not served."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: {folder} is not a Hugging Face model folder")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return parse_config(values, str(path))


def parse_config(values: dict[str, Any], where: str = "config.json") -> DeepSeekConfig:
    model_type = values.get("model_type")
    if model_type not in ("deepseek_v2", "deepseek_v3"):
        raise CheckpointError(
            f"{where}: model_type is {model_type!r}; only 'deepseek_v2' and 'deepseek_v3' are supported"
        )
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{where}: 'quantization_config' says that the weights are quantised ({method}); convert the checkpoint to "
            "bfloat16 first (DeepSeek publishes a script for its FP8 weights)"
        )
    v3 = model_type == "deepseek_v3"
    reader = _Reader(values, where)
    reader.seen |= _IRRELEVANT
    for key, allowed in _FIXED.items():
        reader.fixed(key, allowed)
    eos = reader.get("eos_token_id", [])
    config = DeepSeekConfig(
        vocab_size=reader.need("vocab_size"),
        hidden_size=reader.need("hidden_size"),
        intermediate_size=reader.need("intermediate_size"),
        num_layers=reader.need("num_hidden_layers"),
        num_dense_layers=reader.get("first_k_dense_replace", 0),
        max_position_embeddings=reader.need("max_position_embeddings"),
        rms_norm_eps=reader.need("rms_norm_eps", float),
        tie_word_embeddings=reader.get("tie_word_embeddings", False),
        dtype=reader.get("dtype", reader.get("torch_dtype", "bfloat16")),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        attention=_attention(reader, v3),
        moe=_mixture(reader, v3),
    )
    reader.get("torch_dtype")
    reader.finish()
    if config.dtype not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"{where}: dtype is {config.dtype!r}; only bfloat16, float16 and float32 are supported")
    return config


def _attention(reader: _Reader, v3: bool) -> AttentionConfig:
    heads = reader.need("num_attention_heads")
    reader.fixed("num_key_value_heads", (None, heads))
    # V2's rotation is by interleaved pairs whatever its configuration says; V3's is unless it says otherwise.
    reader.fixed("rope_interleave", (None, True, False) if v3 else (None, True))
    config = AttentionConfig(
        num_heads=heads,
        q_lora_rank=None if reader.get("q_lora_rank") is None else reader.need("q_lora_rank"),
        kv_lora_rank=reader.need("kv_lora_rank"),
        qk_nope_head_dim=reader.need("qk_nope_head_dim"),
        v_head_dim=reader.need("v_head_dim"),
        bias=reader.get("attention_bias", False),
        rope=_rope(reader, reader.get("rope_interleave", True)),
    )
    reader.fixed("head_dim", (None, config.rope.dim))
    reader.fixed("qk_head_dim", (None, config.qk_head_dim))
    return config


def _rope(reader: _Reader, interleave: bool) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (published checkpoints) or `rope_parameters` (transformers 5)."""
    where = f"{reader.where}: rope_parameters" if reader.get("rope_parameters") else f"{reader.where}: rope_scaling"
    rope = _Reader(reader.get("rope_parameters") or reader.get("rope_scaling") or {}, where)
    theta = rope.get("rope_theta", reader.get("rope_theta", 10000.0))
    reader.seen |= {"rope_scaling", "rope_theta"}
    # Published checkpoints call the key "type"; some carry both.
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type")
    rope.fixed("partial_rotary_factor", (None, 1.0))
    yarn = None
    if rope_type == "yarn":
        yarn = YarnConfig(
            factor=rope.need("factor", float),
            original_max_position_embeddings=rope.need("original_max_position_embeddings"),
            beta_fast=rope.get("beta_fast", 32.0),
            beta_slow=rope.get("beta_slow", 1.0),
            mscale=rope.get("mscale", 0.0),
            mscale_all_dim=rope.get("mscale_all_dim", 0.0),
            attention_factor=rope.get("attention_factor"),
            truncate=rope.get("truncate", True),
        )
    elif rope_type != "default":
        raise CheckpointError(f"{where}: rope type {rope_type!r} is not supported; only 'default' and 'yarn' are")
    rope.finish()
    dim = reader.need("qk_rope_head_dim")
    if dim % 2:
        raise CheckpointError(f"{reader.where}: 'qk_rope_head_dim' must be even, got {dim}")
    return RopeConfig(dim=dim, theta=theta, interleave=interleave, yarn=yarn)


def _mixture(reader: _Reader, v3: bool) -> MoEConfig | None:
    reader.fixed("scoring_func", (None, "sigmoid") if v3 else (None, "softmax"))
    reader.fixed("topk_method", (None, "noaux_tc") if v3 else (None, "greedy", "group_limited_greedy"))
    # For V2, DeepSeek's own code scales or normalises, never both, and transformers never normalises.
    reader.fixed("norm_topk_prob", (None, True, False) if v3 else (None, False))
    limited = v3 or reader.get("topk_method") == "group_limited_greedy"
    keys = "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts routed_scaling_factor n_group"
    reader.seen |= {*keys.split(), "topk_group"}
    dense_layers = reader.get("first_k_dense_replace", 0)
    if reader.get("n_routed_experts") is None or dense_layers >= reader.need("num_hidden_layers"):
        return None
    moe = MoEConfig(
        num_experts=reader.need("n_routed_experts"),
        experts_per_token=reader.need("num_experts_per_tok"),
        intermediate_size=reader.need("moe_intermediate_size"),
        num_shared_experts=reader.need("n_shared_experts"),
        sigmoid=v3,
        num_groups=reader.need("n_group") if limited else 1,
        topk_groups=reader.need("topk_group") if limited else 1,
        normalize=reader.get("norm_topk_prob", v3),
        routed_scaling_factor=reader.get("routed_scaling_factor", 1.0),
    )
    # V3 scores a group by its two best experts, so it needs two in each.
    size, rest = divmod(moe.num_experts, moe.num_groups)
    reachable = size * min(moe.topk_groups, moe.num_groups)
    if rest or (v3 and size < 2) or moe.topk_groups > moe.num_groups or moe.experts_per_token > reachable:
        raise CheckpointError(
            f"{reader.where}: {moe.experts_per_token} experts a token cannot be chosen from {moe.topk_groups} of "
            f"{moe.num_groups} groups of {moe.num_experts} experts"
        )
    return moe
