"""The multi-turn bias of credit (arXiv:2606.29238, Eq. 22–27), measured on the rollouts that a record kept. No torch.

An advantage compares an action with its state, so its mean over the actions of a state is 0. Credit that depends on the
prompt alone has another mean, the bias:

    Bias_h(s_0, s) = E[A | start s_0, state s at turn h]       |Bias_h| ≤ h·r_max + 2·V_max,   Bias_0 = 0

The square of a sampled mean is too large by its own variance. Rollouts of different groups are independent, so the mean
of their products is not: with t_g the sum of A over the n_g rollouts of group g that met the place (s_0, s),

    MS(place) = (T² − Σ_g t_g²) / (n² − Σ_g n_g²),   T = Σ_g t_g, n = Σ_g n_g

and MS_h is its mean over the places that two groups met, weighted by n. A group mean contains the rollout itself, so
the result is (R − 1)/R of the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def bias_by_turn(arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, float | None]]:
    """One row per turn from the rollouts of a step: RMS bias of three baselines, the largest |Bias|, and P1's bound.

    `rms_outcome`: A = G − mean of the group's G, P1's own. `rms_turn`: the return from turn h on, less the group's mean
    at that turn. `rms_state`: the same less the mean of the siblings in the same state. Where the estimate of a square
    is below 0, its RMS has a minus sign. Empty where the rollouts have no states.
    """
    if "step_state" not in arrays or "step_reward" not in arrays:
        return []
    state, reward, group = arrays["step_state"], arrays["step_reward"].astype(np.float64), arrays["group"]
    exists = state >= 0
    if not exists.any():
        return []
    go = np.where(exists, reward, 0.0)[:, ::-1].cumsum(axis=1)[:, ::-1]
    outcome = _less_mean(go[:, 0], group)
    most, turns = float(np.abs(reward[exists]).max()), state.shape[1]
    out: list[dict[str, float | None]] = []
    for h in range(turns):
        here = exists[:, h]
        if not here.any():
            continue
        of, place = group[here], _numbered(state[here, 0], state[here, h])
        siblings = _numbered(of, state[here, h])
        by_turn = _less_mean(go[here, h], of)
        by_state = np.where(np.bincount(siblings)[siblings] > 1, _less_mean(go[here, h], siblings), by_turn)
        means = np.bincount(place, outcome[here]) / np.bincount(place)
        out.append({"turn": float(h), "rms_outcome": rms(outcome[here], place, of), "rms_turn": rms(by_turn, place, of),
                    "rms_state": rms(by_state, place, of), "largest": float(np.abs(means).max()),
                    "bound": h * most + 2 * turns * most, "n": float(here.sum())})
    return out


def rms(credit: Array, place: NDArray[np.int64], group: NDArray[Any]) -> float | None:
    """√MS_h with the sign of MS_h; None where no place was met by two groups.

    >>> rms(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 0]), np.array([0, 0, 1]))  # (9² − 4² − 5²) / (9 − 4 − 1) = 10
    3.1622776601683795
    """
    total, weight = 0.0, 0
    for number in np.unique(place):
        here = place == number
        index = np.unique(group[here], return_inverse=True)[1].reshape(-1)
        sums, sizes = np.bincount(index, credit[here]), np.bincount(index)
        pairs = int(sizes.sum() ** 2 - (sizes**2).sum())
        if pairs:
            total += int(sizes.sum()) * float(sums.sum() ** 2 - (sums**2).sum()) / pairs
            weight += int(sizes.sum())
    if not weight:
        return None
    return float(np.sign(total) * np.sqrt(abs(total) / weight))


def _numbered(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """One number per distinct pair."""
    return np.unique(np.stack([a, b], axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def _less_mean(value: Array, place: NDArray[Any]) -> Array:
    """value − the mean of its place."""
    index = np.unique(place, return_inverse=True)[1].reshape(-1)
    return value - (np.bincount(index, value) / np.bincount(index))[index]
