"""How many problems an evaluation samples at a time."""

from __future__ import annotations

from itertools import islice

import pytest

from creditscope.lab import evaluate
from creditscope.policy.loading import load_policy
from creditscope.tasks.arithmetic import Arithmetic


def test_models_with_large_keys_and_values_are_evaluated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, problems = load_policy("tiny", device="cpu"), list(islice(Arithmetic().problems("test"), 20))
    assert evaluate.at_once(policy, problems, 80) == 128
    monkeypatch.setattr(evaluate, "MOST", {"cpu": 512})
    assert evaluate.at_once(policy, problems, 80) == 512
    # Keys and values of one token: 2 · layers · heads · width numbers.
    config = policy.model.config
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim \
        * (80 + max(len(policy.encode(problem.prompt)) for problem in problems))
    monkeypatch.setattr(evaluate, "KEYS", 200 * row)
    assert evaluate.at_once(policy, problems, 80) == 200
    monkeypatch.setattr(evaluate, "KEYS", 10 * row)
    assert evaluate.at_once(policy, problems, 80) == 128
