"""The settings of `creditscope inspect` for a file of rollouts; its flags are made from this class."""

from __future__ import annotations

from dataclasses import dataclass, fields

from creditscope.credit.table import parse
from creditscope.errors import CreditscopeError, unknown
from creditscope.methods.find import find

FORMATS = ("auto", "creditscope", "trl", "verl", "openai", "skyrl", "areal", "prime_rl", "nemo_rl", "swift")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings for a file of rollouts."""

    model: str | None = None
    """tiny, a folder, a .gguf file, or owner/name on the hub: gives the tokens and log-probs that the file lacks,
    entropies, and the exact Gram of the rollouts' gradients."""
    method: str = "grpo"
    """A row of the table: creditscope list methods."""
    credit: str | None = None
    """The credit estimator: creditscope list credits. Those with continuations or a critic do not work on a file."""
    format: str = "auto"
    """auto, creditscope, trl, verl, openai, skyrl, areal, prime_rl, nemo_rl or swift."""
    reward_field: str | None = None
    """The field that holds the reward. TRL's columns of several reward functions are named with commas and summed."""
    rows: int = 512
    """Rollouts after which a batch is closed, at the end of a group, where the file names no step."""
    max_tokens: int | None = None
    """L_max of methods that divide by it (dr_grpo); by default the longest answer of the batch."""
    scope: str = "light"
    """With a model: off; light: the Gram under the method's credit; full: also that of the unweighted scores, nulls,
    the optimal baseline and spectra of each layer's gradient."""
    every: int = 1
    """Batches between readings of the microscope."""
    keep_every: int = 10
    """Batches between kept rollouts (groups/*.npz), the first groups of a batch; 0 keeps none."""
    keep_most: int = 0
    """Most files of each kind (groups, scope), spread evenly: above it every second is deleted. 0 keeps all."""
    temperature: float = 1.0
    """Sampling temperature at which the file's log-probs were taken."""
    chat: str = "auto"
    """on, off, or auto: wrap prompts that are text in the chat template where the tokenizer has one."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    dtype: str = "float32"
    """float32, bfloat16 or float64."""

    def __post_init__(self) -> None:
        find(self.method)
        if self.credit is not None:
            parse(self.credit)
        for name, choices in {"format": FORMATS, "scope": ("off", "light", "full"),
                              "chat": ("auto", "on", "off")}.items():
            if getattr(self, name) not in choices:
                raise unknown(f"--{name}", getattr(self, name), choices)
        if self.scope == "full" and self.model is None:
            raise CreditscopeError("--scope full reads the gradients of a model; name it with --model")
        for name, least in {"rows": 1, "every": 1, "keep_every": 0, "keep_most": 0, "max_tokens": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise CreditscopeError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if not 0 < self.temperature < float("inf"):
            raise CreditscopeError(f"--temperature must be a finite number above 0, got {self.temperature}")

    def flags(self) -> list[str]:
        """The flags of `creditscope inspect` that differ from their defaults.

        >>> Settings(model="tiny", keep_every=0).flags()
        ['--model', 'tiny', '--keep-every', '0']
        """
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value))]
