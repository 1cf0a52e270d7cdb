"""The settings of `creditscope lab reward`, each with what it means. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from creditscope.runs.settings import at_least, in_range, one_of, seeds

PARTS = {"all": 3e-4, "head": 1e-2}
"""What is trained -> its default learning rate."""


@dataclass(frozen=True, kw_only=True)
class RewardPlan:
    """What is trained on which pairs, and how."""

    pairs: str
    """JSON lines of TRL's preference format: prompt, chosen, rejected."""
    model: str = "tiny"
    """The model that gets the head: tiny (packaged), a folder, a .gguf file, or owner/name on the hub. A policy that is
    trained against the reward must have the same tokenizer."""
    train: str = "all"
    """all weights; or the head alone, on hidden states that are computed once."""
    epochs: int = 4
    """Passes over the pairs."""
    batch: int = 64
    """Pairs per step."""
    lr: float | None = None
    """Largest learning rate of AdamW, which falls linearly to 0; by default 3e-4 for all weights, 1e-2 for the head. A
    head that is trained with all weights has 1e-2: it starts at 0, they do not."""
    seed: int = 0
    """Fixes the order of the pairs."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    dtype: str = "float32"
    """float32, bfloat16 or float64, in which the model is read; it is trained in float32 or wider."""
    chat: str = "auto"
    """on, off, or auto: wrap prompts in the chat template where the tokenizer has one; as in training."""

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs", "batch")
        in_range(self, "lr")
        one_of(self, "train", PARTS)
        one_of(self, "chat", ("auto", "on", "off"))
        seeds(self, "seed")

    @property
    def rate(self) -> float:
        """The learning rate at the first step."""
        return PARTS[self.train] if self.lr is None else self.lr

    @property
    def head_rate(self) -> float:
        """That of the head."""
        return max(self.rate, PARTS["head"]) if self.train == "all" else self.rate
