"""Tiny random DeepSeek models, made by transformers, for the tests of the reference model under `examples/`.

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
    model = getattr(transformers, f"DeepseekV{case.version}ForCausalLM")(config)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith((".bias", "e_score_correction_bias")):
                tensor.uniform_(-0.3, 0.3)
    # Rounded once here, so that the same weights can be run in bf16 and in fp32.
    return model.to(case.dtype).eval()


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
