"""What the values of a Hugging Face config.json must be, and the names of its keys for messages about our Config."""

from ladder.checkpoints.checkpoint import LARGEST_NUMBER, MOST_LAYERS
from ladder.errors import InputError, as_json

HF_KEYS = {  # {a field of Config: the key that it comes from}, where these differ
    "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "dim": "hidden_size", "max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "rotary_dim": "partial_rotary_factor * head_dim",
    "eos_ids": "eos_token_id", "bos_id": "bos_token_id", "qkv_bias": "attention_bias", "wo_bias": "attention_bias",
}  # fmt: skip


def whole(low, high=LARGEST_NUMBER[int]):
    return f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high


def real(low, high=1e30):
    words = f"a number above {low}" + f" and at most {high:g}" * (high < 1e30)
    return words, lambda value: type(value) in (int, float) and low < value <= high


def many(words, fits, or_one=False):
    return words, lambda value: all(map(fits, value)) if isinstance(value, list) else or_one and fits(value)


is_index = whole(0)[1]
KINDS = [  # ((what a value must be, a function that says whether it is), keys)
    (whole(1, MOST_LAYERS), "num_hidden_layers"),
    (whole(1), """hidden_size num_attention_heads intermediate_size vocab_size max_position_embeddings head_dim
        num_key_value_heads decoder_sparse_step full_attention_interval sliding_window_pattern
        _sliding_window_pattern no_rope_layer_interval linear_num_key_heads linear_num_value_heads
        linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim num_lanes q_lora_rank kv_lora_rank
        qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group n_routed_experts"""),
    (whole(0), """sliding_window max_window_layers num_experts num_local_experts num_experts_per_tok
        moe_intermediate_size shared_expert_intermediate_size broadcast_delay first_k_dense_replace
        n_shared_experts"""),
    (whole(-MOST_LAYERS, MOST_LAYERS), "sliding_window_n_layers"),
    (whole(-1), "bos_token_id"),
    (real(0), """rms_norm_eps layer_norm_eps norm_eps query_pre_attn_scalar attn_logit_softcapping
        final_logit_softcapping embedding_multiplier logits_scaling residual_multiplier attention_multiplier
        routed_scaling_factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor"""),
    (real(0, 10000), "factor scaling_factor"),  # the context is a multiple of it
    (real(1), "original_max_position_embeddings rope_theta rope_local_base_freq"),
    (real(0, 1), "partial_rotary_factor"),
    (("a number, 0 or more", lambda value: type(value) in (int, float) and 0 <= value <= 1e30),
        "mscale mscale_all_dim llama_4_scaling_beta farskip_start_idx farskip_end_idx"),
    (("true or false", lambda value: type(value) is bool), """tie_word_embeddings attention_bias mlp_bias qkv_bias
        attention_out_bias use_qkv_bias use_sliding_window use_parallel_residual parallel_blocks qk_norm
        norm_topk_prob rope_interleave use_qk_norm gated_attention farskip truncate
        attn_only_farskip mlp_only_farskip
        use_comm use_attention_comm use_mlp_comm use_early_comm pre_norm_lane_agg
        replicated_rmsn_scale"""),
    (("a text", lambda value: isinstance(value, str)),
        "hidden_act hidden_activation rope_type type wiring lm_head_type attn_mask_type topk_method"),
    (("an object", lambda value: isinstance(value, dict)),
        "rope_scaling rope_parameters full_attention sliding_attention"),
    (many("a list of names", lambda value: isinstance(value, str)), "layer_types mlp_layer_types"),
    (many("a list of layers, from 0", is_index), "mlp_only_layers swa_layers unclamped_layers"),
    (many("a list of 0 and 1", lambda value: value in (0, 1)), "no_rope_layers"),
    (many("a list of numbers above 0", real(0)[1]), "short_factor long_factor"),
    (many("a number of layers, or a list of layers, from 0", is_index, or_one=True), "ladder_layers"),
    (many("an id, or a list of ids", whole(-1)[1], or_one=True), "eos_token_id"),
]  # fmt: skip
KIND_OF = {key: kind for kind, keys in KINDS for key in keys.split()}


def check_values(values, keys, prefix=""):
    """Raise InputError for a value of one of these keys that is not what it must be. null stands for no value."""
    for key, value in values.items():
        words, fits = KIND_OF.get(key, ("", None))
        if key in keys and fits and value is not None and not fits(value):
            raise InputError(f"{prefix}{key} is {as_json(value)} but must be {words}")
