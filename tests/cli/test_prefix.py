"""`creditscope inspect --prefix` as a user meets it: from a file and from a run, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli import loaded, run
from creditscope import METHODS, Record
from creditscope.batch.jsonl import read_jsonl
from creditscope.batch.kept import rollouts_of
from creditscope.exact.shared_prefix import prefix_bias, prefix_metrics
from creditscope.objective.kept import kept_arrays
from each import each
from records import write_record


def row(tokens: list[int], reward: float, group: int = 0, **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "logp": [-0.5] * len(tokens), "reward": reward, "group": group} | more


TWO = [row([1, 2], 1.0), row([1, 3, 4, 5], 0.0)]


def written(path: Path, rows: list[dict[str, Any]] = TWO) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def recorded(path: Path, rows: list[dict[str, Any]], steps: tuple[int, ...] = (0, 10)) -> str:
    """A run that kept these rollouts at some steps; the first kept step has the rewards turned round."""
    rollouts = read_jsonl(written(path.with_suffix(".jsonl"), rows))
    w = torch.zeros(rollouts.mask.shape)
    arrays = kept_arrays(METHODS["grpo"], rollouts, w, w, rollouts.logp)
    kept = {step: arrays | ({} if n else {"reward": 1 - arrays["reward"]}) for n, step in enumerate(steps)}
    return str(write_record(path, {key: {} for key in steps}, {"method": "grpo"}, groups=kept))


def test_one_method_of_a_file_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "--prefix", written(tmp_path / "r.jsonl"), "--method", "grpo", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    # A = ±1/√2, ω = 1/4 and 1/8: the first token's W is a third of what is pulled, 1/(8√2), and evenly 0.
    assert (facts["rollouts"], facts["tokens"], facts["prefix/root_nodes"]) == (2, 6, 1)
    assert facts["prefix/root"] == pytest.approx(1 / 3)
    assert facts["prefix/tokens"] == pytest.approx(2 / 6)
    (node,) = facts["most_biased"]
    assert (node["rows"], node["of"], node["prefix"]) == (2, 2, "«1 »")
    assert node["W"] == pytest.approx(1 / (8 * 2**0.5))
    assert node["even"] == pytest.approx(0, abs=1e-15)


def test_every_method_of_a_file_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "r.jsonl")
    assert run("inspect", "--prefix", file, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["methods"]) | set(facts["left_out"]) == set(METHODS)
    referred = {"dpo", "ipo", "slic", "rdpo", "kto"}
    assert set(facts["left_out"]) == {"ppo", "gtpo"} | referred  # a critic, entropies, a reference
    batch = read_jsonl(file, dtype=torch.float64)
    for name, reading in facts["methods"].items():
        assert reading == prefix_metrics(prefix_bias(METHODS[name], batch), batch)
    assert run("inspect", "--prefix", file) == 0
    out = capsys.readouterr().out
    for text in ("33.3% of them on 1 shared tokens", "left out: method 'ppo' takes its credit from outside",
                 f"Next: creditscope inspect {file} --prefix --method grpo"):
        assert text in out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(" ") and line.strip()}
    assert lines["grpo"][:2] == ["no", "0.333"]
    assert lines["grpo_even"][:3] == ["yes", "0", "0"]


def test_even_weights_are_offered_next_and_found_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "r.jsonl")
    for name in ("grpo", "sapo"):
        assert run("inspect", "--prefix", file, "--method", name) == 0
        assert f"Next: creditscope inspect {file} --prefix --method {name}_even" in capsys.readouterr().out
    assert run("inspect", "--prefix", file, "--method", "sapo_even", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["method"] == "sapo_even"
    assert facts["prefix/root"] == pytest.approx(0, abs=1e-12)
    assert facts["most_biased"] == []
    assert run("inspect", "--prefix", file, "--method", "grpo_even") == 0
    assert "Next: creditscope lab train --method grpo_even" in capsys.readouterr().out


def test_a_run_is_read_at_its_last_kept_step_or_the_one_asked_for(tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "run", TWO)
    assert run("inspect", "--prefix", folder, "--method", "grpo", "--json") == 0
    last = json.loads(capsys.readouterr().out)
    assert (last["step"], last["source"]) == (10, "run")
    assert run("inspect", "--prefix", folder, "--method", "grpo", "--json", "--step", "0") == 0
    first = json.loads(capsys.readouterr().out)
    # With the rewards turned round the long answer is the good one.
    assert first["most_biased"][0]["W"] == pytest.approx(-last["most_biased"][0]["W"])
    assert run("inspect", "--prefix", folder) == 0
    assert "run, step 10: 2 rollouts" in capsys.readouterr().out


def test_a_prefix_is_shown_once_up_to_where_its_answers_part(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row([1, 2, 3], 1.0, pieces=["12", " + ", "5"]), row([1, 2, 4, 5], 0.0, pieces=["12", " + ", "7", "\n"])]
    assert run("inspect", "--prefix", written(tmp_path / "r.jsonl", rows), "--method", "grpo", "--json") == 0
    (node,) = json.loads(capsys.readouterr().out)["most_biased"]
    assert (node["prefix"], node["column"]) == ("12« + »", 1)


def test_text_of_a_model_cannot_move_the_cursor_or_style_the_page(tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    evil = ["\x1b[2J", "[bold]x", "\n"]
    rows = [row([1, 2, 3], 1.0, pieces=evil), row([1, 2, 3, 5], 0.0, pieces=[*evil, "y"])]
    assert run("inspect", "--prefix", written(tmp_path / "r.jsonl", rows), "--method", "grpo") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J[bold]x«⏎»" in out


@each(("args", "message"), [
    (("r.jsonl", "--method", "grop"), "unknown method 'grop'; did you mean 'grpo'?"),
    (("r.jsonl", "--method", "grop_even"), "unknown method 'grop'"),
    (("r.jsonl", "--step", "3"), "has no rollouts of --step 3: it names none; leave --step out"),
    (("r.jsonl", "--method", "ppo"), "takes its credit from outside"),
    (("r.jsonl", "--method", "gtpo"), "needs entropy but the rollouts have none"),
    (("run", "--step", "7"), "no rollouts were kept of step 7; kept: [0, 10]"),
    (("nowhere.jsonl",), "nowhere.jsonl"),
    (("empty",), "holds no rollouts: no file in it ends in .jsonl or .parquet"),
    (("bare",), "kept no rollouts; train with --keep-every"),
    (("lone.jsonl", "--method", "grpo"), "group 1 has one rollout"),
])
def test_what_cannot_be_read_is_exit_code_2_in_words(args: tuple[str, ...], message: str, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "r.jsonl")
    written(tmp_path / "lone.jsonl", [*TWO, row([1], 1.0, group=1)])
    recorded(tmp_path / "run", TWO)
    (tmp_path / "empty").mkdir()
    Record.create(tmp_path / "bare", {}, {}).close()
    assert run("inspect", "--prefix", str(tmp_path / args[0]), *args[1:]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_what_a_run_kept_comes_back_as_the_rollouts_it_was(tmp_path: Path) -> None:
    rows = [r | {"pieces": ["a"] * len(r["tokens"]), "text": "aa", "prompt": "p", "entropy": [0.5] * len(r["tokens"])}
            for r in TWO]
    folder = recorded(tmp_path / "run", rows)
    back = rollouts_of(Record.open(folder).group(10))
    there = read_jsonl(tmp_path / "run.jsonl", dtype=torch.float64)
    for name in ("tokens", "mask", "reward", "group"):
        assert torch.equal(getattr(back, name), getattr(there, name))
    assert torch.allclose(back.logp, there.logp, atol=1e-7)
    assert back.logp.dtype == torch.float64
    assert list(back.text) == ["aa", "aa"]
    assert np.array(back.pieces[1]).tolist() == ["a"] * 4


@pytest.mark.slow
def test_a_wrong_name_is_told_before_torch_is_loaded() -> None:
    assert "torch" not in loaded("from creditscope.cli.main import main; main(sys.argv[1:])", "inspect", __file__,
                                 "--prefix", "--method", "grop")
