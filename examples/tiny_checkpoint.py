"""A random DeepSeek-V3 checkpoint of a few megabytes, written by transformers, for runs without a real one."""

from pathlib import Path

import torch


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, **overrides) -> None:
    """Writes config.json and model.safetensors: DeepSeek-R1's attention dimensions, little else; 256 ids, one a byte.

    Weights are drawn wider than transformers draws them, and the router's correction is not zero: with the defaults the
    logits are all but constant and every token goes to the same experts.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = dict(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=8, num_key_value_heads=8, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, n_group=4, topk_group=2, q_lora_rank=64, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
            "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        },
        bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    # A seed of its own: what the caller draws next does not depend on whether a checkpoint was written.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings | overrides))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
        model.save_pretrained(folder)
