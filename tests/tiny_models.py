"""Tiny random DeepSeek models, made by transformers: for the tests of the reference model under `examples/`, and, with
the attention dimensions of R1 and in every class that has them (`FAMILY`), for those of the adapter to transformers.

Not trivial: weights are wide enough that logits differ by several units and routing depends on the token, norms and
biases are not their identities, and the router's correction is not zero.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    name: str
    version: int
    dtype: torch.dtype = torch.float32
    settings: dict = field(default_factory=dict)

    @property
    def id(self):
        return f"v{self.version}-{self.name}-{str(self.dtype)[6:]}"


CASES = [
    Case("qlora-yarn", 3, settings={"rope_parameters": YARN}),
    Case("halves-bias-tied", 3, settings={
        "rope_parameters": PLAIN, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True,
        "tie_word_embeddings": True, "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
    }),
    Case("greedy", 2, settings={"rope_parameters": YARN, "q_lora_rank": None, "topk_method": "greedy"}),
    Case("groups", 2, settings={
        "rope_parameters": YARN | {"mscale_all_dim": 0.707}, "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 0, "routed_scaling_factor": 16.0, "attention_bias": True,
    }),
    Case("dense", 2, settings={"rope_parameters": PLAIN, "first_k_dense_replace": 3}),
]  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A class of transformers whose attention is MLA with R1's dimensions, by one of the models that use it."""

    name: str
    config: str
    model: str
    settings: dict = field(default_factory=dict)


R1_DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
PLAIN_R1 = {"rope_parameters": PLAIN, "q_lora_rank": 24}
EXPERTS = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
HYBRID = EXPERTS | {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 16,
    "num_local_experts": 4, "q_lora_rank": None,
}  # fmt: skip
FAMILY = [
    Member("DeepSeek-V3", "DeepseekV3Config", "DeepseekV3ForCausalLM", EXPERTS | {
        "rope_parameters": YARN, "q_lora_rank": 24,
    }),
    Member("DeepSeek-V2", "DeepseekV2Config", "DeepseekV2ForCausalLM", EXPERTS | {
        "rope_parameters": YARN, "q_lora_rank": 24, "topk_method": "group_limited_greedy",
    }),
    Member("DeepSeek-V2-Lite", "DeepseekV2Config", "DeepseekV2ForCausalLM", EXPERTS | {
        "rope_parameters": YARN | {"mscale_all_dim": 0.707}, "q_lora_rank": None, "topk_method": "greedy",
    }),
    Member("Kimi-K2.5", "Kimi_K25Config", "Kimi_K25ForConditionalGeneration", EXPERTS | {
        "rope_parameters": YARN, "q_lora_rank": 24, "n_group": 1,
    }),
    Member("LongCat-Flash", "LongcatFlashConfig", "LongcatFlashForCausalLM", PLAIN_R1 | {
        "num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "n_routed_experts": 4,
        "zero_expert_num": 2,
    }),
    Member("A.X-K1", "AXK1Config", "AXK1ForCausalLM", EXPERTS | PLAIN_R1),
    Member("Youtu", "YoutuConfig", "YoutuForCausalLM", PLAIN_R1),
    Member("Sarvam", "SarvamMLAConfig", "DeepseekV3ForCausalLM", EXPERTS | {
        "rope_parameters": YARN, "q_lora_rank": None,
    }),
    Member("Kimi-Linear", "KimiLinearConfig", "KimiLinearForCausalLM", HYBRID),
    Member("Ling-3.0", "BailingHybridConfig", "BailingHybridForCausalLM", HYBRID | {
        "rope_parameters": PLAIN, "head_dim": 16, "num_mtp_layers": 0,
    }),
]  # fmt: skip
YOUTU = next(member for member in FAMILY if member.name == "Youtu")
VISION = {
    "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2, "num_attention_heads": 2,
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32,
}  # fmt: skip


def build_member(member: Member, **changes) -> transformers.PreTrainedModel:
    """Two layers, two heads, random; in eval mode. transformers without that class skips the test."""
    if not hasattr(transformers, member.config):
        pytest.skip(f"transformers {transformers.__version__} has no {member.config}")
    settings = R1_DIMS | dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        initializer_range=0.1,
    ) | member.settings | changes  # fmt: skip
    if "num_layers" in settings:
        del settings["num_hidden_layers"]  # LongCat-Flash has two attention modules a layer
    if member.config == "Kimi_K25Config":
        settings = {"text_config": settings | {"model_type": "deepseek_v3"}, "vision_config": VISION}
    config = getattr(transformers, member.config)(**settings)
    torch.manual_seed(7)
    return _unlike_identity(getattr(transformers, member.model)(config)).eval()


def build(case: Case) -> transformers.PreTrainedModel:
    settings = dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
        num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2, q_lora_rank=24, kv_lora_rank=32,
        qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=16, max_position_embeddings=512, routed_scaling_factor=2.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, rms_norm_eps=1e-5, initializer_range=0.15,
    ) | case.settings  # fmt: skip
    config = getattr(transformers, f"DeepseekV{case.version}Config")(**settings)
    torch.manual_seed(7)
    model = _unlike_identity(getattr(transformers, f"DeepseekV{case.version}ForCausalLM")(config))
    # Rounded once here, so that the same weights can be run in bf16 and in fp32.
    return model.to(case.dtype).eval()


def _unlike_identity(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """`model` with norms and biases that show when they are left out."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith((".bias", "e_score_correction_bias")):
                tensor.uniform_(-0.3, 0.3)
    return model


class Folders:
    """Case -> folder with its checkpoint, written once."""

    def __init__(self, tmp_path_factory):
        transformers.utils.logging.disable_progress_bar()
        self.tmp_path_factory, self.written = tmp_path_factory, {}

    def __call__(self, case: Case) -> Path:
        if case.id not in self.written:
            self.written[case.id] = self.tmp_path_factory.mktemp(case.id)
            build(case).save_pretrained(self.written[case.id])
        return self.written[case.id]
