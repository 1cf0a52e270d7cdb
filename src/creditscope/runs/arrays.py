"""The record's npz arrays: each once, with its kind, its axes, one sentence and who writes it.

Equal letters are equal lengths within one file: B rollouts of T tokens and S reasoning steps, C credits of --also, E
special tokens in groups/; N rollouts, L parameters, G groups of R rollouts, O credits of --also, M gradient matrices in
scope/; F reward scales and L parameters in optimizer/; K numbers of a sketch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType


@dataclass(frozen=True)
class Array:
    file: str
    """groups, scope or optimizer: the folder of its npz files."""
    name: str
    kind: str
    """As `files.arrays.KINDS` calls it."""
    axes: str
    sentence: str
    writer: str


_group = partial(Array, "groups", writer="objective.kept")
_scope = partial(Array, "scope", writer="microscope.observer")
_optimizer = partial(Array, "optimizer", writer="optimizer.probe")

_ROWS = (
    _group("tokens", "whole numbers", "BT", "Token ids of the answers."),
    _group("step", "whole numbers", "BT", "The reasoning step of each token, −1 outside of steps."),
    _group("mask", "truth values", "BT", "True where the policy chose the token."),
    _group("logp", "numbers", "BT", "log π_old: of the sampler."),
    _group("ref_logp", "numbers", "BT", "log π_ref, where the method has a reference."),
    _group("entropy", "numbers", "BT", "Of the sampling distribution, nats."),
    _group("group", "whole numbers", "B", "The prompt of each rollout."),
    _group("reward", "finite numbers", "B", "r_i."),
    _group("step_state", "whole numbers", "BS", "The state in which each turn begins."),
    _group("step_reward", "finite numbers", "BS", "Reward of each reasoning step."),
    _group("prompt", "texts", "B", "The prompt as text."),
    _group("text", "texts", "B", "The answer as text."),
    _group("pieces", "texts", "BT", "The text of each token."),
    _group("special_ids", "whole numbers", "E", "The tokens among them that have no text: ends, turns, padding."),
    _group("special_names", "texts", "E", "Their names, such as <|im_end|>."),
    _group("credit", "numbers", "BT", "A_it: what the estimator gave a token."),
    _group("w", "numbers", "BT", "w_it = ∂J/∂log π(y_it) at the recorded pass: what the objective made of it."),
    _group("live_logp", "numbers", "BT", "log π of the recorded pass."),
    _group("clipped", "truth values", "BT", "Past the bound at live_logp."),
    _group("after_logp", "numbers", "BT", "log π after the last update, where the probe made its closing pass."),
    _group("after_past", "numbers", "BT", "Nats past the bound at after_logp."),
    _group("other_names", "texts", "C", "The credits of --also."),
    _group("other_credit", "numbers", "CBT", "A_it by each of them."),

    _scope("group", "whole numbers", "N", "The prompt of each rollout."),
    _scope("reward", "finite numbers", "N", "r_i."),
    _scope("row_w", "finite numbers", "N", "w_i, where all tokens of each rollout have the same w; absent otherwise."),
    _scope("gram", "numbers", "NN", "K_ij = ⟨g_i, g_j⟩; NaN where two rollouts were never in one pass."),
    _scope("scores", "numbers", "NN", "⟨ψ_i, ψ_j⟩ of the unweighted scores, with --scope full."),
    _scope("eps", "finite numbers", "", "Relative precision of the Grams' entries."),
    _scope("other_names", "texts", "O", "The credits of --also."),
    _scope("other_grams", "numbers", "ONN", "The Gram under each of them."),
    _scope("layer_names", "texts", "L", "The parameters."),
    _scope("layer_groups", "whole numbers", "G", "The prompt of each group's block."),
    _scope("layers", "numbers", "LGRR", "Grams by parameter and group, float32."),
    _scope("token_norms_head", "numbers", "NT", "‖∇_W log π(y_t)‖² of the output head W, with --scope full."),
    _scope("path_gradient", "numbers", "K", "Sketch of the step's gradient."),
    _scope("path_update", "numbers", "K", "Sketch of θ_{s+1} − θ_s."),
    _scope("matrix_names", "texts", "M", "The layers whose gradient is a matrix."),
    _scope("matrix_stable_rank", "numbers", "M2", "Lower and upper bound of Σσ²/σ₁² of each gradient matrix."),
    _scope("matrix_effective_rank", "numbers", "M2", "The same of (Σσ)²/Σσ²."),
    _scope("matrix_energy", "numbers", "M", "‖∇_W J‖² of each."),

    _optimizer("phi", "numbers", "F", "φ: the factors on all rewards."),
    _optimizer("since", "texts", "", "start or now: since when rewards are multiplied."),
    _optimizer("change", "numbers", "F", "‖Δ(φ) − Δ(1)‖ / ‖Δ(1)‖."),
    _optimizer("cosine", "numbers", "F", "cos(Δ(φ), Δ(1))."),
    _optimizer("layer_names", "texts", "L", "The parameters."),
    _optimizer("layer_change", "numbers", "LF", "change of each."),
    _optimizer("layer_cosine", "numbers", "LF", "cosine of each."),
    _optimizer("layer_ratio", "numbers", "L", "‖Δ‖ / ‖θ‖ of each."),
    _optimizer("path_update", "numbers", "K", "Sketch of the batch's first update."),
)
ARRAYS: Mapping[str, Mapping[str, Array]] = MappingProxyType(
    {file: {row.name: row for row in _ROWS if row.file == file} for file in ("groups", "scope", "optimizer")})
"""File -> name -> array."""


def _table(file: str, *names: str) -> dict[str, tuple[str, str]]:
    return {name: (row.kind, row.axes) for name, row in ARRAYS[file].items() if name in names}


ROLLOUTS = _table("groups", "tokens", "step", "mask", "logp", "ref_logp", "entropy", "group", "reward", "step_state",
                  "step_reward", "prompt", "text", "pieces")
"""What rollouts are rebuilt from, for `files.arrays.fitting`."""
READING = _table("scope", "group", "reward", "row_w", "gram", "scores", "eps", "other_names", "other_grams",
                 "layer_names", "layer_groups", "layers")
"""What claims read of a file of scope/."""
