"""Pointing at the wrong step: the AUC by hand, what plants an error, what reads one, and a small run of each."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from creditscope import METHODS, CreditscopeError
from creditscope.batch.rollouts import Rollouts
from creditscope.cli.main import main
from creditscope.credit import find_estimator
from creditscope.credit.tools import Tools
from creditscope.lab.rollout import roll_out
from creditscope.policy import scoring
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.scoring import encode_exactly, score_tokens
from creditscope.runs.config import Config
from creditscope.studies.localise import Localiser, auc, bootstrap, culprits, step_hit
from creditscope.studies.planted_errors import follows, localise_planted, plant, planted_batch, wrong_numbers
from creditscope.studies.processbench import as_rollouts, askable, localise_processbench, read_processbench
from creditscope.tasks import Problem
from creditscope.tasks.arithmetic import Arithmetic
from each import each

TASK = Arithmetic()
ENTRY = {"id": "e-0", "generator": "none", "problem": "Mia has 12 apples. She buys 7 more apples. How many?",
         "steps": ["12 + 7 = 18", "18 + 0 = 18", "#### 18"], "final_answer_correct": False, "label": 0}


@pytest.fixture(scope="module")
def tiny() -> Policy:
    return load_policy("tiny", device="cpu")


@pytest.fixture(scope="module")
def planted(tiny: Policy) -> tuple[Rollouts, torch.Tensor]:
    """Groups of 4 with an error planted in one rollout each, and the step of the error."""
    made = planted_batch(tiny, TASK, list(islice(TASK.problems("test"), 6)), Config(group=4), seed=0)
    assert made is not None
    return made[0].rollouts, made[1]


def small(step: list[int], reward: float = 0.0) -> Rollouts:
    """One rollout, and a sibling that was right."""
    shape = (2, len(step))
    return Rollouts(tokens=torch.ones(shape, dtype=torch.int64), mask=torch.ones(shape, dtype=torch.bool),
                    logp=-torch.ones(shape), reward=torch.tensor([reward, 1.0]), group=torch.tensor([0, 0]),
                    step=torch.tensor([step, step]), entropy=torch.ones(shape))


# -- the measure -------------------------------------------------------------------------------------------


def test_auc_counts_pairs_and_half_a_pair_for_a_tie() -> None:
    # Positives 3 and 1, negatives 2 and 1: 3 beats both, 1 loses to 2 and ties with 1: (1 + 1 + 0 + ½) / 4.
    assert auc(torch.tensor([3.0, 1.0, 2.0, 1.0]), torch.tensor([True, True, False, False])) == 2.5 / 4


def test_auc_equals_the_count_over_all_pairs() -> None:
    draw = torch.Generator().manual_seed(0)
    score = torch.randint(0, 4, (40,), generator=draw).double()
    positive = torch.rand(40, generator=draw) < 0.3
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in score[positive] for b in score[~positive]]
    assert auc(score, positive) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert auc(-score, positive) == pytest.approx(1 - auc(score, positive), abs=1e-12)


def test_credit_on_one_token_of_n_gets_a_half_and_a_2nth_but_the_step_is_hit() -> None:
    step = torch.tensor([0] * 5 + [1] * 8 + [2] * 3)
    score = torch.zeros(16)
    score[9] = 1.0
    assert auc(score, step == 1) == 0.5 + 1 / 16
    assert step_hit(score, step, 1) == (1.0, 1 / 3)


def test_steps_that_tie_share_the_hit() -> None:
    assert step_hit(torch.ones(6), torch.tensor([0, 0, 1, 1, 2, -1]), 1) == (1 / 3, 1 / 3)


def test_a_perfect_localiser_gets_1_and_its_opposite_blames_wrongly() -> None:
    batch = small([0, 0, 1, 1, 2])
    score = torch.where(batch.step == 1, -1.0, 0.0)
    found = Localiser(seed=0)
    found.add("blames", score, batch, torch.tensor([1, -1]))
    found.add("praises", -score, batch, torch.tensor([1, -1]))
    blames, praises = found.findings()
    assert (blames.n, blames.size.mean, blames.blame.mean, blames.hit.mean) == (1, 1.0, 1.0, 1.0)
    assert (praises.size.mean, praises.blame.mean) == (1.0, 0.0)


def test_what_differs_by_rounding_alone_is_a_tie() -> None:
    batch = small([0, 0, 1, 1, 2])
    score = torch.full((2, 5), 0.7) + 1e-8 * torch.arange(5)
    found = Localiser(seed=0)
    found.add("flat", score.double(), batch, torch.tensor([1, -1]))
    (flat,) = found.findings()
    assert (flat.size.mean, flat.silent, flat.hit.mean) == (0.5, 1, flat.chance)


def test_the_bootstrap_is_seeded_and_holds_its_mean() -> None:
    values = [0.0, 1.0, 1.0, 0.5, 0.25]
    first = bootstrap(values, seed=3)
    assert first == bootstrap(values, seed=3)
    assert first.mean == pytest.approx(0.55)
    assert 0 < first.low < first.mean < first.high < 1


def test_the_culprit_is_the_first_step_marked_wrong_of_a_wrong_answer() -> None:
    marks = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    batch = small([0, 0, 1, 1, 2])
    batch = replace(batch, step_reward=marks)
    assert culprits(batch).tolist() == [1, -1]


# -- planting ----------------------------------------------------------------------------------------------


@each("seed", range(4))
def test_planted_text_differs_in_one_line_which_the_verifier_marks_as_the_first_wrong_one(seed: int) -> None:
    rng = random.Random(seed)
    for problem in islice(TASK.problems("test"), 60):
        planted = plant(problem, rng)
        lines, reference = planted.text.splitlines(), problem.meta["solution"].splitlines()
        assert planted.text.endswith("\n")
        assert [i for i, line in enumerate(lines) if line != reference[i]] == [planted.line] == [len(lines) - 1]
        assert planted.line < len(reference) - 1, "the answer's line is never planted"
        whole = "\n".join([*lines, *reference[len(lines):]])
        marks = [step.reward for step in TASK.verify(problem, whole).steps]
        assert marks[:planted.line + 1] == [1.0] * planted.line + [0.0]
        assert 1 <= planted.wrong <= 99


@each("right", range(1, 100))
def test_there_is_a_wrong_number_for_every_right_one(right: int) -> None:
    found = wrong_numbers(right, 99)
    assert found
    assert right not in found
    assert all(1 <= n <= 99 for n in found)


def test_a_tail_is_kept_only_where_it_follows_from_the_wrong_number_to_a_wrong_answer() -> None:
    problem = Problem("p", "Mia has 12 apples. She buys 7 more. She loses 9.", "10",
                      {"chain": ("12 + 7 = 19", "19 - 9 = 10"), "solution": "12 + 7 = 19\n19 - 9 = 10\n#### 10"})
    planted = plant(problem, random.Random(1))
    while planted.line:
        planted = plant(problem, random.Random(planted.wrong))
    n = planted.wrong
    assert follows(TASK, problem, planted, f"{n} - 9 = {n - 9}\n#### {n - 9}")
    assert not follows(TASK, problem, planted, f"{n} - 9 = {n - 8}\n#### {n - 8}"), "a second error"
    assert not follows(TASK, problem, planted, f"{n} - 9 = {n - 9}\n#### {n - 8}"), "an answer from nowhere"
    assert not follows(TASK, problem, planted, "19 - 9 = 10\n#### 10"), "back to the right number"
    assert not follows(TASK, problem, planted, f"{n} - 9 = {n - 9}"), "no answer"


@pytest.mark.slow
def test_each_group_of_a_planted_batch_has_one_culprit_and_its_tokens_are_the_planted_line(
        planted: tuple[Rollouts, torch.Tensor]) -> None:
    rows, culprit = planted
    assert (culprit >= 0).any()
    assert rows.group[culprit >= 0].tolist() == rows.group.unique().tolist()
    assert (torch.bincount(rows.group) == 4).all()
    assert (rows.reward[culprit >= 0] == 0).all()
    assert torch.equal(culprits(rows)[culprit >= 0], culprit[culprit >= 0])
    for i in (culprit >= 0).nonzero()[:, 0].tolist():
        inside = (rows.step[i] == culprit[i]).nonzero()[:, 0].tolist()
        line = "".join(rows.pieces[i][t] for t in inside)
        assert line == rows.text[i].splitlines(keepends=True)[int(culprit[i])]


def test_text_that_the_tokenizer_cannot_give_back_is_refused(tiny: Policy) -> None:
    assert tiny.decode(encode_exactly(tiny, "12 + 7 = 19\n", "it")) == "12 + 7 = 19\n"
    with pytest.raises(CreditscopeError, match=r"problem x: the tokenizer of 'tiny' does not give the text back"):
        encode_exactly(tiny, "12 + 7 = 19 © \U0001f600\n", "problem x")


# -- scoring -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_of_sampled_tokens_are_the_sampler_s_own(tiny: Policy, temperature: float,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    batch = roll_out(tiny, TASK, list(islice(TASK.problems("test"), 4)), 3, max_tokens=60, temperature=temperature,
                     top_p=1.0, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(scoring, "COLUMNS", 7)
    rows, ticks = batch.rollouts, []
    for budget in (2**26, 20_000, 1):
        monkeypatch.setattr(scoring, "LOGITS", budget)
        ticks.clear()
        found = score_tokens(tiny, rows.prompt_ids, rows.tokens, rows.mask, temperature,
                             lambda *done: ticks.append(done))
        for name in ("logp", "entropy", "collision"):
            torch.testing.assert_close(getattr(found, name), getattr(rows, name), atol=1e-5, rtol=0)
        assert ticks[-1] == (12, 12)


def test_what_does_not_fit_into_the_model_is_refused_by_row(tiny: Policy) -> None:
    ones = torch.ones(2, 300, dtype=torch.int64)
    with pytest.raises(CreditscopeError, match=r"row 0 has 2 tokens in its prompt and 300 in its answer"):
        score_tokens(tiny, [[1, 2], [1]], ones, ones.bool())
    with pytest.raises(CreditscopeError, match="prompt 1 is empty"):
        score_tokens(tiny, [[1, 2], []], ones[:, :3], ones[:, :3].bool())


# -- ProcessBench ------------------------------------------------------------------------------------------


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "bench.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@each("change, message", [
    ({"label": 3}, r"entry 1 \('e-0'\): label must be a step from 0 to 2, or -1 for none, got 3"),
    ({"label": -2}, r"label must be a step from 0 to 2, or -1 for none, got -2"),
    ({"label": True}, r"label must be int, got bool 'True'"),
    ({"label": 1.0}, r"label must be int, got float '1.0'"),
    ({"steps": "12 + 7"}, r"steps must be list, got str"),
    ({"steps": []}, r"steps is empty"),
    ({"steps": ["a", 7]}, r"steps\[1\] must be a text that is not empty, got int '7'"),
    ({"steps": ["a", ""]}, r"steps\[1\] must be a text that is not empty"),
    ({"problem": " "}, r"problem is empty"),
    ({"problem": None}, r"problem must be str, got NoneType"),
    ({"final_answer_correct": 1}, r"final_answer_correct must be bool, got int '1'"),
    ({"id": 5}, r"entry 1: id must be str, got int '5'"),
    ({"problem": "\ud800"}, r"entry 1 .* has half a character"),
    ({"steps": ["a", "b \udfff", "c"]}, r"entry 1 .* has half a character"),
])
def test_a_faulty_entry_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        read_processbench(written(tmp_path, [ENTRY, ENTRY | change]))


@each("name", ["id", "problem", "steps", "final_answer_correct", "label"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CreditscopeError, match=rf"entry 0.* has no '{name}'"):
        read_processbench(written(tmp_path, [{k: v for k, v in ENTRY.items() if k != name}]))


@each("content, message", [
    ("", "is not JSON"), ("[{", "is not JSON"), ("[]", "an empty list"), ("{}", "got dict"),
    ("[1]", "entry 0 must be an object"), ("[" * 100_000, "nested too deeply|is not JSON"),
])
def test_a_file_that_is_no_list_of_solutions_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        read_processbench(written(tmp_path, content))
    with pytest.raises(CreditscopeError, match=r"cannot read .*No such file"):
        read_processbench(tmp_path / "none.json")


def test_every_token_of_a_solution_belongs_to_the_step_it_begins_in(tmp_path: Path, tiny: Policy) -> None:
    (solution,) = read_processbench(written(tmp_path, [ENTRY]))
    rows = as_rollouts(tiny, [solution])
    for s, step in enumerate(solution.steps):
        text = "".join(rows.pieces[0][t] for t in (rows.step[0] == s).nonzero()[:, 0].tolist())
        assert text.rstrip("\n") == step
    assert askable(rows, torch.tensor([0])).tolist() == [0]
    assert askable(rows, torch.tensor([7])).tolist() == [-1]


def test_outcome_credit_points_nowhere_exactly(tmp_path: Path, tiny: Policy) -> None:
    right = ENTRY | {"steps": ["12 + 7 = 19", "#### 19"], "final_answer_correct": True, "label": -1}
    solutions = read_processbench(written(tmp_path, [ENTRY, right, ENTRY | {"label": 2}]))
    found = localise_processbench(tiny, solutions, seed=0)
    table = {row.name: row for row in found.tables["processbench"]}
    for name in ("outcome", "leave_one_out"):
        assert (table[name].size.mean, table[name].blame.mean) == (0.5, 0.5)
        assert table[name].hit.mean == table[name].chance
        assert table[name].silent == table[name].n == 2
    assert set(table) >= {"surprise", "entropy", "early", "optimal_token", "entropy_mask", "entropy_shaping"}
    assert set(found.skipped) >= {"monte_carlo", "gae", "step_reward", "prefix_tree", "salt"}


def test_a_file_without_a_marked_step_says_so(tmp_path: Path, tiny: Policy) -> None:
    solutions = read_processbench(written(tmp_path, [ENTRY | {"label": -1}] * 2))
    with pytest.raises(CreditscopeError, match="none of the 2 solutions has a step marked wrong"):
        localise_processbench(tiny, solutions, seed=0)


# -- whole runs --------------------------------------------------------------------------------------------


def test_outcome_is_a_half_on_planted_errors_too_whatever_the_method(planted: tuple[Rollouts, torch.Tensor]) -> None:
    rows, culprit = planted
    found = Localiser(seed=0)
    for name in ("grpo", "dr_grpo", "rloo"):
        found.add(name, find_estimator("outcome")(METHODS[name], rows, Tools()), rows, culprit)
    assert [(row.size.mean, row.blame.mean) for row in found.findings()] == [(0.5, 0.5)] * 3


@pytest.mark.slow
def test_monte_carlo_finds_planted_errors_and_outcome_does_not(tiny: Policy) -> None:
    ticks: list[tuple[int, int]] = []
    found = localise_planted(tiny, TASK, problems=20, group=4, samples=4, seed=1,
                             credit=["outcome", "monte_carlo,samples=4"], tick=lambda *done: ticks.append(done))
    table = {row.name: row for row in found.tables["planted"]}
    assert table["outcome"].size.mean == 0.5
    assert table["monte_carlo,samples=4"].size.low > 0.6
    assert table["monte_carlo,samples=4"].hit.low > table["outcome"].chance
    with pytest.raises(CreditscopeError, match="credit 'state_return' needs a task that names the state"):
        localise_planted(tiny, TASK, problems=20, group=4, samples=4, seed=1, credit=["state_return"])
    assert ticks[-1] == (20, 20)


@pytest.mark.slow
def test_one_seed_is_one_table(tiny: Policy) -> None:
    credit = ["outcome", "monte_carlo,samples=1"]
    one, two, other = (localise_planted(tiny, TASK, problems=3, group=2, samples=1, seed=seed, credit=credit).tables
                       for seed in (1, 1, 2))
    assert one == two != other


@pytest.mark.slow
def test_the_verb_prints_its_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, [ENTRY, ENTRY | {"label": -1, "final_answer_correct": True}])
    for extra, expected in (([], "surprise *"), (["--json"], '"processbench"')):
        with pytest.raises(SystemExit) as end:
            main(["papers", "localise", "--processbench", str(path), "--device", "cpu", *extra])
        assert end.value.code == 0
        assert expected in capsys.readouterr().out


@each("flags, message", [
    (["--problems", "0"], "--problems must be at least 1, got 0"),
    (["--problems", "9999"], "the test split has 1000"),
    (["--group", "1"], "--group must be at least 2, got 1"),
    (["--samples", "0"], "--samples must be at least 1, got 0"),
])
def test_a_size_that_cannot_be_is_refused_before_the_model_is_loaded(
        flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["papers", "localise", str(tmp_path), *flags])  # an empty folder is no model
    assert end.value.code == 2
    assert message in capsys.readouterr().err
