"""The model sizes from which the shapes of all statistics follow."""

from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """Numbers of layers, query heads (`heads`) and KV heads, and channels of a head (`head_dim`)."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Shape":
        """Returns the sizes in the model's configuration."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, heads, kv_heads, head_dim)
