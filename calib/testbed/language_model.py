"""A small Llama, trained from nothing: the model that ships with the project as its default.

Grouped-query attention, RoPE and tied embeddings as in the large Llamas, small enough for two CPU cores.
"""

import math
import time
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from calib.testbed.curriculum import IGNORED
from calib.testbed.pretraining_data import VALIDATION_LINES
from calib.testbed.scores import exact_answers


class LanguageModel(LightningModule):
    """`LlamaForCausalLM` with random weights, and how it learns.

    Args:
        vocabulary: number of tokens; must be that of the tokenizer.
        layers: decoder layers.
        hidden: width of the residual stream.
        mlp: width inside the MLP.
        heads: query heads.
        kv_heads: key-value heads; divides `heads`.
        head_dim: channels of a head.
        rope_theta: base of the rotary frequencies.
        positions: longest sequence it is declared for.
        learning_rate: the peak, reached after the warm-up.
        warmup_steps: steps of linear warm-up from 0.
        final_fraction: of the peak, where the cosine ends with the last step.
        weight_decay: of matrices; norms have none.
        betas: of AdamW.
    """

    def __init__(
        self,
        vocabulary: int = 2048,
        layers: int = 4,
        hidden: int = 256,
        mlp: int = 704,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        rope_theta: float = 10_000.0,
        positions: int = 2048,
        learning_rate: float = 2e-3,
        warmup_steps: int = 200,
        final_fraction: float = 0.03,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        if heads % kv_heads:
            raise ValueError(
                f"heads={heads}, kv_heads={kv_heads}: the query heads must divide evenly among the KV heads"
            )
        self.save_hyperparameters()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                num_hidden_layers=layers,
                hidden_size=hidden,
                intermediate_size=mlp,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
                max_position_embeddings=positions,
                tie_word_embeddings=True,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                attn_implementation="sdpa",
            )
        )

    def masked_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy (nats) of the labelled tokens given those before; both [rows, tokens] int64.

        Only the positions that predict a labelled token go through the output matrix: in a generated document they
        are the minority, and that matrix is a seventh of the multiplications.
        """
        states = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = labels[:, 1:]
        counted = wanted != IGNORED
        return functional.cross_entropy(self.model.lm_head(states[counted]).float(), wanted[counted])

    def on_train_start(self) -> None:
        self.clock = time.monotonic()

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss = self.masked_loss(batch["input_ids"], batch["labels"])
        now = time.monotonic()
        rows, tokens = batch["input_ids"].shape
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/tokens_per_second", rows * tokens / (now - self.clock), prog_bar=True)
        self.log("train/row_length", float(tokens))
        self.clock = now
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int, dataloader_idx: int = 0) -> None:
        """Loader 0 is text (perplexity per token); the others are retrieval cases (share of exact answers)."""
        rows = len(batch["input_ids"])
        if dataloader_idx == 0:
            loss = self.masked_loss(batch["input_ids"], batch["labels"])
            self.log("val/loss", loss, batch_size=rows, add_dataloader_idx=False)
            return
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        share = exact_answers(logits, batch["labels"]).float().mean()
        name = f"val/retrieval_{VALIDATION_LINES[dataloader_idx - 1]}_lines"
        self.log(name, share, batch_size=rows, add_dataloader_idx=False, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics.get("val/loss")
        if loss is not None:
            self.log("val/perplexity", loss.exp(), prog_bar=True)
        self.clock = time.monotonic()  # validation is no part of the training speed

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW on two groups, and the schedule by step."""
        p = self.hparams
        matrices = [weight for weight in self.parameters() if weight.ndim >= 2]
        vectors = [weight for weight in self.parameters() if weight.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": p.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=p.learning_rate,
            betas=tuple(p.betas),
        )
        steps = self.trainer.max_steps
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, steps, p.warmup_steps, p.final_fraction)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def schedule(step: int, steps: int, warmup: int, final: float) -> float:
    """Fraction of the peak learning rate: linear warm-up, then half a cosine down to `final` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
