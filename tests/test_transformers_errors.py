"""Promise: what cannot work is refused by a sentence that names the argument; model and cache are as before."""

from dataclasses import dataclass, field

import pytest
import torch

from test_transformers_use import FP8, GREEDY, forward, generate_with, prompt
from tiny_models import YOUTU, build_member, transformers
from ts_ops.integrations.transformers import prepare

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Misfit:
    config: str
    message: str
    settings: dict = field(default_factory=dict)


INDEXED = "an indexer selects"
MISFITS = [
    Misfit("Glm4MoeLite", "qk_nope_head_dim must be 128, got 192"),
    Misfit("MiniCPM3", "kv_lora_rank must be 512, got 256"),
    Misfit("Mistral4", "kv_lora_rank must be 512, got 256"),
    Misfit("DeepseekV32", INDEXED),
    Misfit("GlmMoeDsa", INDEXED),
    Misfit("AXK2", INDEXED),
    Misfit("HYV4", INDEXED),
    Misfit("DeepseekV3", "v_head_dim must be 128, got 64", {"v_head_dim": 64}),
    Misfit("DeepseekV3", "num_attention_heads must be at most 128, got 256", {
        "num_attention_heads": 256, "num_key_value_heads": 256,
    }),
]  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: f"{misfit.config}-{misfit.message[:12]}")
def test_models_that_do_not_fit(misfit):
    """With the dimensions of their real configurations; on the meta device, for they are large."""
    if not hasattr(transformers, f"{misfit.config}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no such model")
    layers = {"num_hidden_layers": 2} | misfit.settings
    config = getattr(transformers, f"{misfit.config}Config")(**layers)
    with torch.device("meta"):
        large = getattr(transformers, f"{misfit.config}ForCausalLM")(config)
    with pytest.raises(ValueError, match=f"^model has {misfit.config}.* layers, which do not fit: .*{misfit.message}"):
        prepare(large)


def test_other_models_and_options_are_refused(youtu):
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **tiny))
    with pytest.raises(TypeError, match="^model is a LlamaForCausalLM, whose attention keeps no latents"):
        prepare(llama)
    with pytest.raises(TypeError, match="^model must be a transformers PreTrainedModel, got Linear"):
        prepare(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^model is a YoutuModel, which has no generate\(\)"):
        prepare(youtu.model)
    with pytest.raises(ValueError, match="prepared already; undo"), prepare(youtu):
        prepare(youtu)
    for options, error, message in [
        ({"cache_dtype": torch.int8}, TypeError, "^cache_dtype must be .*, got torch.int8"),
        ({"page_size": 48}, ValueError, "^page_size must be a power of two up to 128, got 48"),
        ({"fp8_query": True}, ValueError, "^fp8_query goes with cache_dtype=torch.float8_e4m3fn, got torch.float32"),
        ({"k_scales": 1.0}, ValueError, "^k_scales goes with cache_dtype"),
        ({"cache_dtype": FP8, "k_scales": [1.0]}, ValueError, "^k_scales must be one number or one for each of 2"),
        ({"cache_dtype": FP8, "k_scales": 0.0}, ValueError, "^k_scales must be positive and finite"),
    ]:
        with pytest.raises(error, match=message):
            prepare(youtu, **options)
    quantised = build_member(YOUTU)
    quantised.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(torch.nn.Identity())
    quantised.model.layers[1].self_attn.kv_b_proj.weight = torch.ones(1)
    with pytest.raises(ValueError, match="kv_b_proj must be a plain nn.Linear"):
        prepare(quantised)
    assert "expand_kv" not in vars(youtu.model.layers[0].self_attn)


CALLS = {
    "cache full": (ValueError, "the cache holds 128 tokens a row and 129 were asked for: .* larger max_length"),
    "batch": (ValueError, "cache.* has 2 rows, and the batch has 3|past_key_values has 2 rows, and the batch has 3"),
    "other model": (ValueError, "belongs to another model"),
    "stock cache": (ValueError, "must come from .cache.. of the prepared model"),
    "grad": (RuntimeError, r"inference only: call the model under torch.no_grad\(\)"),
    "dropout": (ValueError, r"attention_dropout must be 0, got 0.5: call model.eval\(\)"),
    "4D mask": (ValueError, r"attention_mask must be \[B, tokens so far\]"),
    "packed": (ValueError, "attention_mask must be plain causal attention with padding"),
    "device": (ValueError, "is on cpu and the model on meta: make a new cache"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_cannot_work(call, youtu):
    """The error comes with nothing changed: the cache still counts the tokens it did."""
    error, message = CALLS[call]
    other = build_member(YOUTU)
    with prepare(youtu) as prepared, prepare(other) as prepared_other, pytest.raises(error, match=message):
        cache, ids = prepared.cache(2, 128), prompt(2, 100)
        forward(prepared, cache, ids)
        if call == "cache full":
            try:
                forward(prepared, cache, ids[:, :29])
            finally:
                assert cache.lengths.seq_lens.tolist() == [100, 100] and cache.get_seq_length() == 100
                forward(prepared, cache, ids[:, :28])
        elif call == "batch":
            forward(prepared, cache, prompt(3))
        elif call == "other model":
            forward(prepared_other, cache, ids)
        elif call == "stock cache":
            stock = transformers.StaticCache(config=youtu.config, max_cache_len=32)
            forward(prepared, stock, ids[:, :4])
        elif call == "grad":
            youtu(ids)
        elif call == "dropout":
            other.model.layers[0].self_attn.attention_dropout = 0.5
            forward(prepared_other, prepared_other.cache(2, 128), ids[:, :4]).sum()
            other.train()
            forward(prepared_other, prepared_other.cache(2, 128), ids[:, :4])
        elif call == "4D mask":
            forward(prepared, cache, ids[:, :4], attention_mask=torch.ones(2, 1, 4, 104, dtype=torch.bool))
        elif call == "packed":
            forward(prepared, None, ids, use_cache=False, position_ids=torch.arange(100).view(1, 100) % 50)
        elif call == "device":
            other.to("meta")
            forward(prepared_other, prepare_cache_elsewhere(prepared_other), ids.to("meta"))


def prepare_cache_elsewhere(prepared):
    """A cache on the CPU of a model that has moved since."""
    weights = [attention.kv_b_proj for attention in prepared._attentions]
    prepared._attentions[0].kv_b_proj = torch.nn.Linear(512, 512, bias=False)
    cache = prepared.cache(2, 128)
    prepared._attentions[0].kv_b_proj = weights[0]
    return cache


def test_attention_weights_are_refused(prepared):
    with pytest.raises(ValueError, match="output_attentions"):
        forward(prepared, prepared.cache(2, 16), prompt(), output_attentions=True)


def test_generate_refuses_before_it_starts(prepared):
    model, ids, name = prepared.model, prompt(), prepared.cache_name
    with pytest.raises(ValueError, match="cache_implementation must be left out or 'static' .*, got 'dynamic'"):
        model.generate(ids, cache_implementation="dynamic", **GREEDY)
    for cache, message in [
        (prepared.cache(3, 64), f"^{name} has 3 rows, and 2 are generated"),
        (prepared.cache(2, 64), f"^{name} holds 128 tokens a row and generate may need 208: make it with"),
        (transformers.DynamicCache(config=model.config), f"^{name} must come from .cache.. of this prepared model"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate_with(prepared, cache, ids, max_new_tokens=200)


def test_a_cache_needs_its_prepared_model(youtu):
    with prepare(youtu) as prepared:
        cache = prepared.cache(2, 16)
        for arguments in ((0, 16), (2, 0)):
            with pytest.raises(ValueError, match="must be at least 1, got 0"):
                prepared.cache(*arguments)
    with pytest.raises(RuntimeError, match="only a model prepared by ts_ops.integrations can fill"):
        forward(prepared, cache, prompt())


def test_a_model_that_shares_a_config_is_refused(youtu):
    twin = type(youtu)(youtu.config).eval()
    with prepare(youtu), pytest.raises(RuntimeError, match="YoutuAttention was not prepared by ts_ops, but shares"):
        twin(prompt())
    assert twin(prompt()).logits.shape == (2, 9, 97)
