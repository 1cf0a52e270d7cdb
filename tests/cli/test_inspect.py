"""`creditscope inspect` on every kind of path: files of each system, folders, runs; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli import run, run_json
from creditscope import METHODS, Record
from creditscope.batch.jsonl import read_jsonl
from creditscope.exact import prefix_bias, prefix_metrics
from creditscope.offline.one_batch import read_one
from creditscope.offline.settings import Settings
from each import each
from records import write_record

DUMPS = Path(__file__).parents[1] / "offline" / "dumps"
OLD = Path(__file__).parents[1] / "runs" / "record_0.1"
PREFIX = ("prefix/tokens", "prefix/root", "prefix/bias")


def row(tokens: list[int], reward: float, **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "logp": [-0.5] * len(tokens), "reward": reward, "group": 0} | more


TWO = [row([1, 2], 1.0), row([1, 3, 4, 5], 0.0)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def choice(text: str, reward: float) -> dict[str, Any]:
    """One answer as an OpenAI-style log has it, a token per letter."""
    logged = {"content": [{"token": letter, "logprob": -0.5} for letter in text]}
    return {"request": {"messages": [{"role": "user", "content": "1+1="}]}, "reward": reward,
            "response": {"choices": [{"message": {"role": "assistant", "content": text}, "logprobs": logged}]}}


def test_a_file_shows_its_prefix_bias_beside_signal_and_w(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, "inspect", written(tmp_path / "r.jsonl", TWO))
    # A = ±1/√2, ω = 1/4 and 1/8 under GRPO: on the shared token |W| is a third of Σ|w|, evenly 0. Two of six tokens.
    assert [facts[name] for name in PREFIX] == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    even = run_json(capsys, "inspect", tmp_path / "r.jsonl", "--method", "dr_grpo")
    assert [even[name] for name in PREFIX] == pytest.approx([1 / 3, 0, 0], abs=1e-6)
    assert run("inspect", tmp_path / "r.jsonl", "--why") == 0
    out = capsys.readouterr().out
    assert "prefix/bias                0.3333\n  prefix bias, share: Over all shared nodes" in out


def test_the_prefix_bias_of_batches_is_their_mean_by_rollouts(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    # Step 0 has bias 1/3 in two rollouts; step 1, four rollouts of one length, has none.
    steps = [one | {"batch": 0} for one in TWO] + [row([1, 2], reward, batch=1) for reward in (1.0, 0.0, 1.0, 0.0)]
    facts = run_json(capsys, "inspect", written(tmp_path / "r.jsonl", steps))
    assert facts["batches"] == 2
    assert facts["prefix/bias"] == pytest.approx((2 * 1 / 3 + 4 * 0) / 6, abs=1e-6)


@pytest.mark.parametrize(("kind", "model", "step"), [
    ("own", (), None), ("openai", (), None), ("parquet", (), None), ("folder", (), 2),
    ("trl", ("--model", "tiny"), 3), ("verl", ("--model", "tiny"), 10)])
def test_prefix_reads_every_kind_of_file(kind: str, model: tuple[str, ...], step: int | None, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(__file__).parents[2] / "examples" / "completions" if kind == "trl" else DUMPS / kind
    if kind == "own":
        place = written(tmp_path / "r.jsonl", TWO)
    elif kind == "openai":
        place = written(tmp_path / "r.jsonl", [choice("12", 1.0), choice("1345", 0.0)])
    elif kind == "parquet":
        table = pytest.importorskip("pyarrow").Table.from_pylist(TWO)
        pytest.importorskip("pyarrow.parquet").write_table(table, place := tmp_path / "r.parquet")
    elif kind == "folder":
        place = tmp_path / "steps"
        place.mkdir()
        for number in (1, 2):
            written(place / f"{number}.jsonl", [one | {"batch": number} for one in TWO])
    if kind in ("trl", "verl"):
        pytest.importorskip("pyarrow")
    facts = run_json(capsys, "inspect", place, "--prefix", "--method", "grpo", *model)
    assert facts.get("step") == step
    assert facts["prefix/nodes"] > 0
    if kind not in ("trl", "verl"):
        assert facts["prefix/bias"] == pytest.approx(1 / 3)
        assert facts["most_biased"][0]["W"] == pytest.approx(1 / (8 * 2**0.5))


def test_prefix_reads_own_lines_as_one_batch_in_float64(tmp_path: Path) -> None:
    file = written(tmp_path / "r.jsonl", [one | {"group": group} for group in range(400) for one in TWO])
    found, step = read_one(file, Settings(rows=8))  # a batch for `inspect` alone would hold eight rollouts
    there = read_jsonl(file, dtype=found.logp.dtype)
    assert (len(found), step, str(found.logp.dtype)) == (800, None, "torch.float64")
    for name in ("grpo", "gspo", "dapo"):
        here, other = (prefix_metrics(prefix_bias(METHODS[name], rows), rows) for rows in (found, there))
        assert here == other


@each("step", [1, 2, None])
def test_a_file_that_names_steps_is_read_at_the_one_asked_for(step: int | None, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    rows = [one | {"batch": 1} for one in TWO] + [row([1, 2], reward, batch=2) for reward in (1.0, 0.0)]
    file, words = written(tmp_path / "r.jsonl", rows), () if step is None else ("--step", step)
    facts = run_json(capsys, "inspect", file, "--prefix", "--method", "grpo", *words)
    assert facts["step"] == (step or 2)
    assert facts["prefix/bias"] == pytest.approx(1 / 3 if step == 1 else 0, abs=1e-12)


def test_tokens_without_log_probs_have_the_same_prefix_bias(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = [{name: value for name, value in one.items() if name != "logp"} for one in TWO]
    facts = run_json(capsys, "inspect", written(tmp_path / "r.jsonl", bare), "--prefix", "--method", "grpo")
    assert facts["prefix/bias"] == pytest.approx(1 / 3)
    assert run_json(capsys, "inspect", tmp_path / "r.jsonl")["prefix/bias"] == pytest.approx(1 / 3)


def test_a_run_is_known_by_its_record_and_a_folder_of_files_by_its_files(tmp_path: Path,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"objective/value": 0.5 * n, "reward/mean": 0.1 * n} for n in range(5)]
    run_folder = write_record(tmp_path / "run", steps, {"method": "dr_grpo"})
    assert run_json(capsys, "inspect", run_folder)["runs"][0]["progress"]["r"] == pytest.approx(1.0)
    assert len(run_json(capsys, "inspect", run_folder, OLD)["runs"]) == 2
    (tmp_path / "files").mkdir()
    written(tmp_path / "files" / "1.jsonl", TWO)
    assert run_json(capsys, "inspect", tmp_path / "files")["rollouts"] == 2


@each(("words", "message"), [
    ((), "nothing to inspect: name a file of rollouts, such as rollouts.jsonl, or a run"),
    (("nowhere",), "nowhere does not exist; name a file of rollouts, a folder of them, or a run"),
    (("run", "rows.jsonl"), "several paths are runs, and rows.jsonl is none; inspect it alone: creditscope"),
    (("run", "run", "--prefix"), "--prefix reads one path; inspect it alone"),
    (("rows.jsonl", "--step", "1"), "--step 1 chooses the rollouts of --prefix; give --prefix too"),
    (("run", "--model", "tiny"), "--model is for files of rollouts, and run is a run; leave it out"),
    (("run", "--out", "x"), "--out is for files of rollouts, and run is a run; leave it out"),
    (("run", "--method", "dapo"), "--method dapo: a run has its own method; leave it out, or give --prefix"),
    (("rows.jsonl", "--prefix", "--out", "x"), "--out has no effect with --prefix"),
    (("rows.jsonl", "--prefix", "--credit", "salt"), "--credit has no effect with --prefix"),
    (("text.jsonl", "--prefix"), "text.jsonl has answers as text alone, and shared prefixes are counted in tokens"),
    (("rows.jsonl", "--prefix", "--step", "4"), "rows.jsonl has no rollouts of --step 4: it names none; leave --step"),
    (("steps.jsonl", "--prefix", "--step", "4"), "steps.jsonl has no rollouts of --step 4: it has 1, 2; leave --step"),
    (("rows.jsonl", "--resume"), "--resume goes on with a record; name its folder with --out"),
])
def test_what_cannot_be_done_is_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("rows.jsonl"), TWO)
    written(Path("text.jsonl"), [{"prompt": "p", "response": "a", "reward": reward} for reward in (1.0, 0.0)])
    written(Path("steps.jsonl"), [one | {"batch": number} for number in (1, 2) for one in TWO])
    Record.create(Path("run"), {}, {}).close()
    assert run("inspect", *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
