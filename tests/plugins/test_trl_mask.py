"""Tokens that TRL sampled and that the loss's mask leaves out are counted in every generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")

from creditscope.diagnosis.engine import diagnose  # noqa: E402
from creditscope.diagnosis.read import read  # noqa: E402
from creditscope.plugins.trl import ScopeCallback  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from plugins.trl_makers import trainer  # noqa: E402

pytestmark = pytest.mark.conformance


def lines_of(out: Path, spoil: Any = None, kind: Any = trl.GRPOTrainer, **settings: Any) -> list[dict[str, Any]]:
    """The record of a short run; `spoil` changes the mask of each batch in place, as a subclass might."""
    class Spoilt(kind):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            if spoil is not None:
                spoil(found["completion_mask"])
            return found

    live = trainer(Spoilt, **{"max_steps": 4, **settings})
    live.add_callback(ScopeCallback(live, every=1, out=out, alarm=False, gram=False))
    live.train()
    return [dict(line) for line in Record.open(out).steps()]


def finding(out: Path) -> Any:
    return {each.rule: each for each in diagnose(read(out)).findings}["mask"]


@pytest.mark.parametrize("settings", [{}, {"mask_truncated_completions": True}, {"kind": trl.RLOOTrainer}], ids=str)
def test_a_plain_run_leaves_no_sampled_token_out(settings: dict[str, Any], tmp_path: Path) -> None:
    lines = lines_of(tmp_path, **settings)
    keys = ("w/dead_rows", "w/skipped_first", "w/skipped_last")
    assert {line[key] for line in lines for key in keys if key in line} <= {0}
    assert finding(tmp_path).state in ("fine", "unknown")  # unknown where every answer was cut and masked


def test_masked_first_tokens_are_counted_and_named(tmp_path: Path) -> None:
    def spoil(mask: Any) -> None:
        mask[:, :2] = 0

    lines = lines_of(tmp_path, spoil)
    assert [line["w/skipped_first"] for line in lines] == [2] * 4
    assert finding(tmp_path).bad
    assert "the first 2 tokens of most answers" in finding(tmp_path).sentence


def test_masked_rows_are_counted_and_named(tmp_path: Path) -> None:
    def spoil(mask: Any) -> None:
        mask[::2] = 0

    lines = lines_of(tmp_path, spoil)
    assert all(line["w/dead_rows"] > 0 for line in lines)
    assert "of the answers have w = 0 on every token" in finding(tmp_path).sentence
