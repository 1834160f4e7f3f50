"""Shared by tests of plans: Llama-2-7B's configuration, the outputs of `--plan` in docs/plan.md, and their paragraphs that depend
on the machine."""

import re

LLAMA2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "vocab_size": 32000, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5, "dtype": "float16",
}  # fmt: skip


def example(page, name="example"):
    """The output of a command on the page, between the comments `<!-- name -->` and `<!-- end of name -->`."""
    return page.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- end of {name} -->")[0].strip("`\n")


def machines_own(text):
    return [part for part in text.split("\n\n") if part.startswith("Time")]


def untimed(text):
    parts = [part for part in text.split("\n\n") if not part.startswith("Time")]
    return [re.sub(r"[\d,]+ bytes", "so many bytes", part) for part in parts]
