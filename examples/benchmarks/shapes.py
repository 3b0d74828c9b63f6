"""Configurations of whole models, as transformers names their fields, by what the benchmarks call them."""

POSITIONS = 163840
SHARED = dict(
    kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=POSITIONS,
    first_k_dense_replace=1, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
    mscale=0.707, mscale_all_dim=0.707,
)  # fmt: skip
V2_LITE = SHARED | dict(
    model_type="deepseek_v2", vocab_size=102400, hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
    num_key_value_heads=16, q_lora_rank=None, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64,
    num_experts_per_tok=6, n_shared_experts=2, routed_scaling_factor=1.0, topk_method="greedy", n_group=1, topk_group=1,
    norm_topk_prob=False, rope_parameters=YARN,
)  # fmt: skip
SHAPES = {
    "v2-lite": V2_LITE,
    # Four layers of DeepSeek-V3 with dense MLPs alone: 8 GiB.
    "v3-attention": SHARED | dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, num_hidden_layers=4, num_attention_heads=128,
        num_key_value_heads=128, q_lora_rank=1536, intermediate_size=18432,
        rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    ) | dict(first_k_dense_replace=4),
    "tiny": V2_LITE | dict(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=256, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2,
    ),
}  # fmt: skip
