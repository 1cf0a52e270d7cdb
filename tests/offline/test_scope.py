"""What is read from a file is what the lab would have read: signal, credit, w, and the exact Gram of the gradients."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import mini
from cli import run
from creditscope import METHODS, CreditscopeError, Record, Rollouts, advantage, effective_credit, surrogate
from creditscope.batch import metrics
from creditscope.credit import find_estimator
from creditscope.credit.tools import Tools
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.offline.assemble import assemble_for
from creditscope.offline.dumps import Sample
from creditscope.offline.scope import Summary, chunks_of, scope_file
from creditscope.offline.settings import Settings
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import rollout_logp, token_logp
from each import each
from makers import load_script, to_rows

ROOT = Path(__file__).resolve().parents[2]
DUMPS = Path(__file__).parent / "dumps"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(mini.model(), device="cpu")


@pytest.fixture(scope="module")
def sampled(policy: Policy) -> Drawn:
    """Three problems, four answers each; two groups are live."""
    task = mini.Coins()
    found = roll_out(policy, task, list(islice(task.problems("train", 9), 3)), 4, max_tokens=16, temperature=1.0,
                     top_p=1.0, generator=torch.Generator().manual_seed(33))
    assert metrics.signal(found.rollouts)["signal/live_groups"] == 2
    assert found.rollouts.lengths[5] > 4
    assert found.rollouts.group[5] == 1
    assert len(set(found.rollouts.lengths.tolist())) > 4
    assert found.rollouts.reward[4:8].unique().numel() == 2
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(batch: Drawn) -> list[dict[str, Any]]:
    """What a plain log has."""
    r = batch.rollouts
    return [{"prompt": p, "response": t, "reward": x}
            for p, t, x in zip(r.prompt, r.text, r.reward.tolist(), strict=True)]


# -- without a model -------------------------------------------------------------------------------------------------


@each("method", ["grpo", "dapo", "dr_grpo", "rloo", "gspo", "sapo", "dro", "vespo"])
def test_a_file_of_tokens_reads_as_the_batch_it_was(method: str, sampled: Drawn, tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", list(to_rows(sampled.rollouts)))
    read, = scope_file(file, Settings(method=method))
    row, rollouts = METHODS[method], sampled.rollouts
    w = effective_credit(lambda logp: surrogate(row, logp, rollouts), rollouts.logp)
    expected = metrics.signal(rollouts) | metrics.spread(w, rollouts.mask)
    assert {name: read.line[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@each("method", sorted(name for name, row in METHODS.items() if not (row.external or row.linked)))
def test_credit_without_log_probs_is_the_credit_at_ratio_one_or_is_refused(method: str, sampled: Drawn,
                                                                           tmp_path: Path) -> None:
    def found(*drop: str) -> dict[str, Any]:
        rows = [{k: v for k, v in row.items() if k not in drop} for row in to_rows(sampled.rollouts)]
        read, = scope_file(write(tmp_path / "f.jsonl", rows), Settings(method=method))
        return read.line

    with_them = found()
    assert found("logp") == pytest.approx(with_them, rel=1e-5)


@each("method", ["dpo", "cpo", "kto", "simpo"])
def test_a_margin_without_log_probs_is_refused(method: str, sampled: Drawn, tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "logp"} for row in to_rows(sampled.rollouts)]
    with pytest.raises(CreditscopeError, match=f"method '{method}'.* needs (ref_logp|the log-probs of the tokens)"):
        list(scope_file(write(tmp_path / "f.jsonl", rows), Settings(method=method)))


def test_credit_that_hangs_on_log_probs_is_refused_where_there_are_none(sampled: Drawn, tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "logp"} for row in to_rows(sampled.rollouts)]
    file = write(tmp_path / "f.jsonl", rows)
    with pytest.raises(CreditscopeError, match="credit 'optimal_token' needs the log-probs of the tokens, and the file "
                                               "has none; add logp to each row, or give --model"):
        list(scope_file(file, Settings(credit="optimal_token")))


def test_text_alone_gives_signal_and_no_token_s_credit(sampled: Drawn, tmp_path: Path) -> None:
    read, = scope_file(write(tmp_path / "f.jsonl", texts(sampled)), Settings())
    signal = metrics.signal(sampled.rollouts)
    assert {k: v for k, v in signal.items() if k.startswith(("reward/m", "reward/std", "signal/"))}.items() <= \
        read.line.items()
    assert not any(name.startswith(("credit/", "length/m", "entropy/")) for name in read.line)
    # The mean number of characters is what is known of the length.
    assert read.line["length/characters"] == pytest.approx(sum(map(len, sampled.rollouts.text)) / 12)


def test_l_max_of_the_method_may_be_given(sampled: Drawn, tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", list(to_rows(sampled.rollouts)))
    width = int(sampled.rollouts.lengths.max())
    longest, = scope_file(file, Settings(method="dr_grpo"), tmp_path / "a")
    twice, = scope_file(file, Settings(method="dr_grpo", max_tokens=2 * width), tmp_path / "b")
    assert longest.line["w/top10_mass"] == pytest.approx(twice.line["w/top10_mass"])
    a, b = (Record.open(tmp_path / name).group(0)["w"] for name in "ab")
    assert a == pytest.approx(2 * b)


# -- with one --------------------------------------------------------------------------------------------------------


def slow_gram(policy: Policy, rollouts: Rollouts, w: torch.Tensor) -> torch.Tensor:
    """K from one backward a rollout: g_i = Σ_t w_it ∇log π_it over all parameters, K = G Gᵀ."""
    rows = []
    for i in range(len(rollouts)):
        policy.model.zero_grad()
        one = torch.tensor([i])
        part = rollouts.rows(one)
        logp = token_logp(policy, [policy.encode(rollouts.prompt[i])], part.tokens, part.mask, 1.0)
        (logp * w[one]).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in policy.trainable().values() if p.grad is not None]))
    policy.model.zero_grad()
    g = torch.stack(rows)
    return g @ g.T


def from_text(policy: Policy, batch: Drawn) -> Rollouts:
    """The batch in the tokens of its texts: without end tokens, log-probs at ratio 1."""
    ids = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in batch.rollouts.text]
    width = max(map(len, ids))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
    mask = torch.arange(width) < torch.tensor([len(row) for row in ids])[:, None]
    r = batch.rollouts
    return Rollouts(tokens=tokens, mask=mask, logp=torch.zeros(mask.shape, dtype=torch.float64), group=r.group,
                    reward=r.reward.double(), prompt=r.prompt, text=r.text)


@pytest.mark.slow
@pytest.mark.parametrize("logits", [2**26, 1])
def test_the_gram_of_a_text_log_is_that_of_one_backward_a_rollout(logits: int, sampled: Drawn, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.offline.scope.LOGITS", logits)  # 1: every group has a pass of its own
    read, = scope_file(write(tmp_path / "f.jsonl", texts(sampled)), Settings(model=mini.model(), dtype="float64"),
                       tmp_path / "run")
    wide = load_policy(mini.model(), device="cpu", dtype="float64")
    rollouts = from_text(wide, sampled)
    # GRPO at ratio 1, a mean over rows of means over tokens: w_it = A_i / (B·L_i).
    a = advantage(METHODS["grpo"], rollouts.reward, rollouts.group)
    w = a[:, None] / (12 * rollouts.lengths[:, None]) * rollouts.mask
    expected = slow_gram(wide, rollouts, w)
    assert (expected.diagonal() > 0).sum() == 8  # of the two live groups
    found = torch.from_numpy(Record.open(tmp_path / "run").reading(0)["gram"])
    met = rollouts.group[:, None] == rollouts.group if logits == 1 else torch.ones(12, 12, dtype=torch.bool)
    assert torch.allclose(found[met], expected[met], rtol=1e-9, atol=1e-12 * float(expected.max()))
    assert torch.isnan(found[~met]).all()
    assert read.line["grad/norm"] == pytest.approx(math.sqrt(float(expected.sum())), rel=1e-9)
    assert read.line["policy/logp"] == "model"
    assert "policy/sampler_gap" not in read.line


def test_the_file_s_log_probs_are_kept_and_the_model_s_distance_from_them_is_told(
        policy: Policy, sampled: Drawn, tmp_path: Path) -> None:
    live = rollout_logp(policy, sampled.rollouts, 1.0, grad=False)
    rows = list(to_rows(replace(sampled.rollouts, logp=live)))
    settings = Settings(model=mini.model(), method="reinforce", scope="off")
    read, = scope_file(write(tmp_path / "f.jsonl", rows), settings)
    assert read.line["policy/sampler_gap"] < 1e-5  # other paddings, other roundings
    rows[5]["logp"][3] -= 0.25
    read, = scope_file(write(tmp_path / "f.jsonl", rows), replace(settings, method="grpo", keep_every=1),
                       tmp_path / "run")
    assert read.line["policy/sampler_gap"] == pytest.approx(0.25, abs=1e-5)
    assert read.line["policy/logp"] == "file"
    # The model finds the token e^¼ as likely as the file says: w = A·s/(B·L) where the clip does not bind.
    kept = Record.open(tmp_path / "run").group(0)
    r = sampled.rollouts
    a = advantage(METHODS["grpo"], r.reward, r.group)
    expected = a[5] / (12 * r.lengths[5])
    assert kept["w"][5, 2] == pytest.approx(float(expected), rel=1e-4)
    bound = 0.0 if a[5] > 0 else float(expected) * math.exp(0.25)  # past 1 + ε = 1.2, and clipped for A > 0
    assert kept["w"][5, 3] == pytest.approx(bound, rel=1e-4)


def test_entropies_come_from_the_file_or_from_the_model(sampled: Drawn, tmp_path: Path) -> None:
    rows = list(to_rows(sampled.rollouts))
    given, = scope_file(write(tmp_path / "f.jsonl", rows), Settings(model=mini.model(), scope="off"))
    assert given.line["entropy/mean"] == metrics.signal(sampled.rollouts)["entropy/mean"]
    for row in rows:
        del row["entropy"]
    made, = scope_file(write(tmp_path / "f.jsonl", rows), Settings(model=mini.model(), scope="off"))
    assert made.line["entropy/mean"] == pytest.approx(given.line["entropy/mean"], rel=1e-4)


def test_salt_has_the_gram_it_needs_once_there_is_a_model(sampled: Drawn, tmp_path: Path) -> None:
    rows = list(to_rows(sampled.rollouts))
    file = write(tmp_path / "f.jsonl", rows)
    read, = scope_file(file, Settings(model=mini.model(), credit="salt", scope="off"), tmp_path / "run")

    class Slow(Tools):
        def gram(self) -> torch.Tensor:
            wide = load_policy(mini.model(), device="cpu", dtype="float64")
            return slow_gram(wide, replace(sampled.rollouts), sampled.rollouts.mask.double())

    expected = find_estimator("salt")(METHODS["grpo"], sampled.rollouts, Slow())
    plain = advantage(METHODS["grpo"], sampled.rollouts.reward, sampled.rollouts.group)
    assert (expected[:, 0] - plain).abs().max() > 0.01
    assert Record.open(tmp_path / "run").group(0)["credit"] == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-4)
    assert read.line["credit/within"] == pytest.approx(metrics.assigned(expected, sampled.rollouts)["credit/within"],
                                                       abs=1e-4)
    with pytest.raises(CreditscopeError, match="this credit needs a policy to sample from and a verifier"):
        list(scope_file(file, Settings(model=mini.model(), credit="monte_carlo", scope="off")))


def test_tokens_that_are_spelled_are_the_model_s_where_both_cut_alike(policy: Policy, sampled: Drawn,
                                                                      tmp_path: Path) -> None:
    def log(cut: Any) -> Path:
        rows = []
        for row in texts(sampled):
            pieces = cut(policy.pieces(policy.tokenizer(row["response"], add_special_tokens=False)["input_ids"]))
            spelled = {"content": [{"token": piece, "logprob": -0.5} for piece in pieces]}
            rows.append({"messages": [{"role": "user", "content": row["prompt"]}], "reward": row["reward"],
                         "choices": [{"message": {"content": row["response"]}, "logprobs": spelled}],
                         "prompt_token_ids": policy.encode(row["prompt"])})
        return write(tmp_path / "f.jsonl", rows)

    settings = Settings(model=mini.model(), scope="off", format="openai")
    alike, = scope_file(log(list), settings)
    assert alike.line["policy/logp"] == "file"
    assert alike.line["policy/sampler_gap"] > 0.1
    otherwise, = scope_file(log(lambda pieces: ["".join(pieces)]), settings)
    assert otherwise.line["policy/logp"] == "model"
    assert otherwise.line["length/mean"] == alike.line["length/mean"]
    # Without a model, spellings alone give lengths and credit.
    bare, = scope_file(log(list), Settings())
    assert bare.line["length/mean"] == alike.line["length/mean"]
    assert bare.line["w/top10_mass"] == pytest.approx(otherwise.line["w/top10_mass"], rel=1e-5)


@each("change, message", [
    ({"tokens": [10**6], "logp": [-1.0]}, "line 1: token 1000000 is not one of the [0-9,]+ of model 'tiny'"),
    ({"prompt_tokens": [-1]}, "line 1: token -1 is not one of"),
    ({"prompt_tokens": []}, "line 1: the prompt is empty"),
    ({"prompt": [{"role": "user", "content": "a"}]}, "line 1: the prompt is a chat, and the tokenizer of 'tiny'"),
    ({"response": "\ud800"}, "line 1: the text has a lone surrogate and cannot be tokenised"),
    ({"response": "1 " * 4000}, "line 1: prompt and answer have [0-9,]+ tokens, over the context of"),
])
def test_what_a_model_cannot_read_is_told_by_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    row = {"prompt": "Question: 1\nAnswer:\n", "response": "1", "reward": 1.0, "group": 0}
    with pytest.raises(CreditscopeError, match=message):
        list(scope_file(write(tmp_path / "f.jsonl", [row | change, row | change]), Settings(model="tiny")))


def test_a_chat_goes_through_the_model_s_own_template(policy: Policy, sampled: Drawn) -> None:
    chatty = copy.deepcopy(policy.tokenizer)
    chatty.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    told = replace(policy, tokenizer=chatty, chat=True)

    def read(who: Policy, prompt: Any) -> torch.Tensor:
        samples = [Sample("x", row["reward"], prompt(row["prompt"]), row["response"]) for row in texts(sampled)]
        return assemble_for(who, samples, 1.0).rollouts.logp

    # This template adds what the tokenizer adds by itself: a chat in two halves, as text, and text without a template.
    halves = read(told, lambda text: [{"role": "user", "content": half} for half in (text[:10], text[10:])])
    assert torch.equal(halves, read(told, str))
    assert torch.equal(halves, read(policy, str))


def test_a_model_needs_a_prompt(tmp_path: Path) -> None:
    row = {"tokens": [5], "logp": [-1.0], "reward": 1.0, "group": 0}
    with pytest.raises(CreditscopeError, match="line 1: no prompt, and a model needs one"):
        list(scope_file(write(tmp_path / "f.jsonl", [row] * 2), Settings(model="tiny")))


def test_a_pass_holds_whole_groups_and_every_row_has_one(sampled: Drawn) -> None:
    r = replace(sampled.rollouts, group=torch.tensor([2, 0, 0, 1, 1, 2, 0, 1, 2, 2, 3, 3]))
    for logits in (1, 10**5, 10**9):
        vocabulary = max(1, 2**26 // logits)
        found = chunks_of(r, vocabulary)
        assert sorted(torch.cat(found).tolist()) == list(range(12))
        groups = [set(r.group[rows].tolist()) for rows in found]
        assert sum(map(len, groups)) == 4
    assert len(chunks_of(r, 1)) == 1
    assert len(chunks_of(r, 2**26)) == 4


# -- the record ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_other_readers_read_the_record(sampled: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"step": s} for s in range(3) for row in texts(sampled)]
    out = tmp_path / "run"
    assert run("inspect", str(write(tmp_path / "f.jsonl", rows)), "--model", mini.model(), "--scope", "full",
               "--keep-every", "1", "--out", str(out), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["batches"], facts["rollouts"], facts["finished"]) == (3, 36, True)
    record = Record.open(out)
    assert [line["file/step"] for line in record.steps()] == [0, 1, 2]
    assert (record.groups(), record.readings()) == ([0, 1, 2], [0, 1, 2])
    known = {"engine": "offline", "steps": 3, "group": 4, "prompts": 3, "model": mini.model(), "scope": "full"}
    assert known.items() <= record.config.items()
    assert not any(str(tmp_path) in str(value) for value in record.config.values())
    assert run("papers", "check", str(out), "--json") == 0
    capsys.readouterr()
    assert run("report", str(out), "-o", str(tmp_path / "r.html")) == 0
    assert "push in" in capsys.readouterr().out


def test_groups_of_unequal_sizes_are_recorded_without_layers(sampled: Drawn, tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", texts(sampled)[:-1])
    list(scope_file(file, Settings(model=mini.model()), tmp_path / "run"))
    record = Record.open(tmp_path / "run")
    assert "layers" not in record.reading(0)
    assert record.reading(0)["gram"].shape == (11, 11)
    assert "group" not in record.config
    assert run("report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html")) == 0
    assert run("papers", "check", str(tmp_path / "run"), "--json") == 0


def test_a_long_text_does_not_make_the_kept_rollouts_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.offline.scope.KEPT_BYTES", 10**5)
    rows = [{"tokens": [1, 2], "logp": [-1.0, -1.0], "reward": i % 2, "group": g, "prompt": "p", "text": "x" * n}
            for g, n in ((0, 10), (1, 10**5)) for i in range(2)]
    list(scope_file(write(tmp_path / "f.jsonl", rows), Settings(keep_every=1), tmp_path / "run"))
    assert Record.open(tmp_path / "run").groups() == []
    list(scope_file(write(tmp_path / "g.jsonl", rows[:2]), Settings(keep_every=1), tmp_path / "small"))
    assert Record.open(tmp_path / "small").groups() == [0]


def test_only_the_first_groups_of_a_large_batch_are_kept(tmp_path: Path) -> None:
    rows = [{"tokens": [1, 2], "logp": [-1.0, -1.0], "reward": i % 2, "group": g} for g in range(30) for i in range(5)]
    list(scope_file(write(tmp_path / "f.jsonl", rows), Settings(), tmp_path / "run"))
    assert Record.open(tmp_path / "run").group(0)["group"].tolist() == [g for g in range(12) for _ in range(5)]


# -- in sum ----------------------------------------------------------------------------------------------------------


def test_the_summary_of_batches_is_the_reading_of_all_rows_where_it_can_be(sampled: Drawn, tmp_path: Path) -> None:
    rows = [row | {"group": f"{copy}-{row['group']}"} for copy in range(5) for row in to_rows(sampled.rollouts)]
    random.Random(0).shuffle(rows[:12])
    file = write(tmp_path / "f.jsonl", rows)

    def facts(size: int) -> dict[str, Any]:
        summary = Summary()
        for read in scope_file(file, Settings(rows=size)):
            summary.add(read.line)
        return summary.facts()

    one, many = facts(10**6), facts(8)
    assert (one.pop("batches"), many.pop("batches")) == (1, 8)
    exact = ("rollouts", "tokens", "signal/groups", "signal/live_groups", "length/empty", "length/max")
    assert {name: one[name] for name in exact} == {name: many[name] for name in exact}
    for name in ("reward/mean", "length/mean", "signal/dead_groups"):
        assert many[name] == pytest.approx(one[name], rel=1e-6)


def test_counts_add_up_extremes_stay_and_the_rest_is_weighted_by_rollouts() -> None:
    # 2 and 6 rollouts: means (2·½ + 6·1)/8 and, of what only the second has, its own.
    summary = Summary()
    base = {"signal/groups": 1, "signal/live_groups": 1, "time/step": 1.0, "file/row": 3}
    summary.add(base | {"rollouts/used": 2, "reward/mean": 0.5, "length/max": 9, "policy/logp": "file"})
    summary.add(base | {"rollouts/used": 6, "reward/mean": 1.0, "length/max": 4, "signal/live_groups": 0,
                        "w/zero": 0.25})
    assert summary.facts() == {"batches": 2, "rollouts": 8, "policy/logp": "file", "signal/groups": 2,
                               "signal/live_groups": 1, "signal/dead_groups": 0.5, "reward/mean": 0.875,
                               "length/max": 9, "w/zero": 0.25}


# -- the verb --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each("flags, message", [
    (["--resume"], "--resume goes on with a record; name its folder with --out"),
    (["--format", "trl2"], "unknown --format 'trl2'; did you mean 'trl'?"),
    (["--scope", "ful"], "unknown --scope 'ful'; did you mean 'full'?"),
    (["--scope", "full"], "--scope full reads the gradients of a model; name it with --model"),
    (["--rows", "0"], "--rows must be at least 1, got 0"),
    (["--temperature", "0"], "--temperature must be a finite number above 0"),
    (["--method", "grop"], "unknown method 'grop'; did you mean 'grpo'?"),
    (["--format", "verl"], "line 1: no field 'score' for the reward; say where it stands"),
    (["--format", "verl", "--reward-field", "reward"], "line 1: field 'input' is missing; it has 'prompt', 'response'"),
    (["--model", "no/such/model"], "no model 'no/such/model'"),
])
def test_a_wrong_flag_is_exit_code_2_in_words(flags: list[str], message: str, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "f.jsonl", [{"prompt": "a", "response": "b", "reward": r} for r in (0, 1)])
    assert run("inspect", str(file), *flags) == 2
    assert message in capsys.readouterr().err


def test_people_are_told_what_was_read_what_was_not_and_what_comes_next(tmp_path: Path,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(DUMPS / "verl"), "--out", str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    for line in ("fields not read            gts", "batches                    2", "Means over the batches",
                 "Answers are text alone, so no credit of tokens: give --model", f"wrote {tmp_path / 'run'}: run.json",
                 f"Next: creditscope report {tmp_path / 'run'}"):
        assert line in out
    assert run("inspect", str(DUMPS / "verl"), "--out", str(tmp_path / "run"), "--resume") == 0
    assert "Nothing was left to read: the record is complete." in capsys.readouterr().out


def test_people_are_told_of_prompts_that_came_in_an_earlier_batch_too(tmp_path: Path,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "f.jsonl", [{"prompt": f"p{g}", "response": "a", "reward": r}
                                        for r in (0, 1) for g in range(6)])
    assert run("inspect", str(file), "--rows", "4", "--method", "reinforce") == 0
    out = capsys.readouterr().out
    assert "prompts seen before        6\n" in out
    assert "sort the file by prompt or give more --rows; if they were sampled anew, give each row its step." in out
    assert run("inspect", str(file)) == 0
    assert "seen before" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("dump", "flags", "method"), [
    ("trl", [], "grpo (TRL's files do not say the loss; its default is --method trl_dapo)"),
    ("trl", ["--method", "trl_dapo"], "trl_dapo"), ("verl", [], "grpo")])
def test_people_are_told_that_trl_s_files_do_not_say_the_loss(dump: str, flags: list[str], method: str,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    if dump == "trl":
        pytest.importorskip("pyarrow")
    assert run("inspect", str(ROOT / "examples" / "completions" if dump == "trl" else DUMPS / dump), *flags) == 0
    assert f"method                     {method}\n" in capsys.readouterr().out


def test_the_default_loss_of_trl_is_the_one_we_name() -> None:
    trl = pytest.importorskip("trl")
    assert trl.GRPOConfig.__dataclass_fields__["loss_type"].default == "dapo"


@pytest.mark.slow
def test_the_example_reads_what_it_wrote(tmp_path: Path) -> None:
    example = load_script(ROOT / "examples" / "offline.py")
    example.write_log(tmp_path / "log.jsonl", steps=2)
    said = list(example.read_log(tmp_path / "log.jsonl", "tiny", tmp_path / "run"))
    assert "2 of 4 groups carry signal, reward 0.81" in said[0]
    assert "100% read" in said[1]
    assert said[2] == "2 steps in the record"


@pytest.mark.slow
def test_five_lines_put_a_plain_loop_under_the_lens() -> None:
    path = ROOT / "examples" / "own_loop.py"
    marks = [line.split("← ")[1][0] for line in path.read_text().splitlines() if "← " in line]
    assert marks == ["1", "2", "3", "4", "5"]
    found = next(load_script(path).plain(steps=1, inner=1))
    assert 1 < found["gram/effective_rank"] < 32
