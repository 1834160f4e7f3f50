"""Models whose keys cannot be unrotated, and the reason that the message gives."""

import pytest
from toy_models import COMMON, HEADS_4_2_32, random_model
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}

UNROTATABLE = [
    pytest.param(make, reason, id=name)
    for name, make, reason in (
        (
            "dynamic",
            lambda: random_model("llama", rope_parameters=DYNAMIC),
            "RoPE of type 'dynamic', whose frequencies change",
        ),
        (
            "longrope",
            lambda: random_model("llama", rope_parameters=LONG),
            "RoPE of type 'longrope', whose frequencies change",
        ),
        (
            "interleaved",
            lambda: CohereForCausalLM(CohereConfig(**COMMON, **HEADS_4_2_32)).eval(),
            "does not rotate its channels in halves",
        ),
        (
            "none",
            lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=101, pad_token_id=0)).eval(),
            "has 0 rotary embeddings, expected one",
        ),
    )
]
