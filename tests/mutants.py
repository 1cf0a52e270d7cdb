"""Plant a bug and count the tests that turn red: a suite that stays green guards nothing.

    python tests/mutants.py              every mutant must turn enough tests or cases red; else exit code 1
    python tests/mutants.py credit       only those of files whose name holds that word
    python tests/mutants.py --changed    only those whose formula or whose tests differ from the main branch
    python tests/mutants.py --table docs/planted.md        all of them, as a page

MUTANTS are bugs that could be made: three red tests or cases are enough, or one where a row says so. REPLANTED are
bugs that were found and fixed (docs/reliability.md): the fix is undone, and one red test is enough, since many were
fixed with one test.

Each mutant is one textual change in a copy of the package. It runs in a process forked from one that has loaded torch
and transformers but not creditscope, two at a time, against the tests of its part that `make test` runs, until enough
of them are red.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORMULAS = ("tests/objective/test_advantages.py", "tests/objective/test_surrogate.py", "tests/exact/test_p2_table.py")
MICROSCOPE = ("tests/microscope/test_operations.py", "tests/microscope/test_regimes.py",
              "tests/microscope/test_families.py")
OBSERVER = ("tests/microscope/test_observer.py::test_groups_that_micro_batches_cut_apart_have_the_same_grams",)
OBSERVERS = ("tests/lab/test_observers.py",)
READINGS = ("tests/microscope/test_geometry.py", "tests/microscope/test_spectrum.py", "tests/microscope/test_sketch.py")
UNITS = ("tests/credit/test_units.py", "tests/credit/test_outcome.py", "tests/credit/test_gae.py")
STEPS, TREE, CUTS = ("tests/credit/test_steps.py",), ("tests/credit/test_prefixes.py",), ("tests/credit/test_cuts.py",)
SHAPES = ("tests/credit/test_optimal_token.py", "tests/credit/test_entropy.py", "tests/credit/test_salt.py")
OVERSHOOT = ("tests/objective/test_bounds.py", "tests/optimizer/test_overshoot.py")
BRAKES = ("tests/optimizer/test_brakes.py",)
PREFIX, REPLAY = ("tests/exact/test_prefix_bias.py",), ("tests/optimizer/test_replay.py",)
SCALE, STATE = ("tests/optimizer/test_scale.py",), ("tests/optimizer/test_state.py", "tests/optimizer/test_probe.py")
VERDICTS = ("tests/claims/test_verdict.py",)
RUNS = tuple(f"tests/claims/test_{name}.py" for name in ("reading", "p1_credit", "p1_rank", "p1_learning"))
EVIDENCE, TURNS = ("tests/claims/test_evidence.py", *RUNS), ("tests/claims/test_turns.py",)
OURS, ADAPT = ("tests/claims/test_ours.py",), ("tests/lab/test_adapt.py",)
NODES = ("tests/report/test_prefixes.py",)
MARKUP, DOCTOR = ("tests/report/test_markup.py", "tests/report/test_header.py"), tuple(
    f"tests/diagnosis/test_{name}.py" for name in ("rules_reward", "rules_contrast", "rules_movement", "rules_excess",
                                                   "rules_direction", "engine", "onset", "remedies"))
DPO_TRAINER = ("tests/plugins/test_trl_dpo.py",)
LINKED = ("tests/objective/test_links.py", "tests/exact/test_preferences.py", "tests/objective/test_surrogate.py")
VERL, MASK = ("tests/plugins/test_verl_loss.py",), ("tests/lab/test_mask.py",)
EXTRACTION = ("tests/tasks/test_extraction.py",)
MIRROR = ("tests/runs/test_mirror.py",)
PAIR_FILE, REWARD = ("tests/batch/test_pairs.py",), ("tests/lab/test_reward.py",)
ZERO = ("tests/plugins/test_trl_zero.py",)
FOREIGN = ("tests/diagnosis/test_foreign.py",)
PLANTED, HOSTILE = ("tests/stress/test_planted.py",), ("tests/security/test_records.py",)


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = FORMULAS
    """Files, or single tests (FILE::TEST) of a file that takes long."""
    enough: int = 3
    """Red tests or cases, after which no more are run."""

    @property
    def files(self) -> set[str]:
        """The files of its tests."""
        return {test.partition("::")[0] for test in self.tests}


MUTANTS = [
    Mutant("sign of the advantage flipped", "objective/advantages.py",
           "centred = reward - BASELINES", "centred = -reward + BASELINES"),
    Mutant("clip bounds swapped", "methods/bounds.py",
           "(None if m.clip_low is None else 1 - m.clip_low), (None if m.clip_high is None else 1 + m.clip_high)",
           "(None if m.clip_high is None else 1 - m.clip_high), (None if m.clip_low is None else 1 + m.clip_low)"),
    Mutant("mask dropped from the weight", "objective/weights.py",
           "mask = rollouts.mask & keep[:, None]", "mask = torch.ones_like(rollouts.mask) & keep[:, None]"),
    Mutant("mask dropped from the sequence ratio", "objective/ratios.py",
           "log_ratio.sum(dim=1, keepdim=True) / mask.sum(", "log_ratio.sum(1, True) / torch.ones_like(mask).sum("),
    Mutant("min turned into max", "methods/bounds.py",
           "_clamp(s, None, high).where(credit > 0", "_clamp(s, None, high).where(credit < 0"),
    Mutant("std of the other kind", "objective/advantages.py", 'return 1 if method.std == "sample" else 0', "return 0"),
    Mutant("leave-one-out keeps the one", "objective/advantages.py",
           "others = groups.size - 1", "others = groups.size"),
    Mutant("token mean over padding too", "objective/weights.py",
           "(length * counted).sum().clamp(min=1)", "torch.tensor(len(length) * width)"),
    Mutant("KL pulls the wrong way", "objective/surrogate.py",
           "return value - method.beta", "return value + method.beta"),
    Mutant("stop-gradient forgotten", "objective/ratios.py", "factor.detach() * credit", "factor * credit"),
    Mutant("dropped groups still counted", "objective/weights.py",
           'if method.denominator == "kept" else', 'if method.denominator == "never" else'),
    Mutant("unanimous groups not guarded", "objective/advantages.py",
           "centred.masked_fill(groups.unanimous(reward) & ~raw, 0.0)", "centred"),
    Mutant("rows of the tied head and its embedding not crossed", "microscope/gram.py",
           "gram += cross + cross.t()", "pass", MICROSCOPE),
    Mutant("a span of a wide product left out", "microscope/gram.py",
           "torch.bmm(spans, spans.transpose(1, 2)).sum(", "torch.bmm(spans, spans.transpose(1, 2))[1:].sum(",
           MICROSCOPE),
    Mutant("the columns after the last span left out", "microscope/gram.py",
           "return gram if whole == columns else gram + torch.mm(rows[:, whole:], rows[:, whole:].t())", "return gram",
           MICROSCOPE),
    Mutant("spans of a wide product added up in float32", "microscope/gram.py", "SPAN = 1 << 12", "SPAN = 1 << 20",
           MICROSCOPE, enough=1),
    Mutant("rows given to the neighbour", "microscope/rows.py",
           "return units\n        picked = units[self.index]\n        if blank",
           "return units.roll(1, 0)\n        picked = units[self.index.roll(1, 0)]\n        if blank", MICROSCOPE),
    Mutant("positions shared by the rows looked up once", "microscope/recorder.py",
           "ids, delta = source.ids.expand(len(g), -1), source.straight(g)",
           "ids, delta = source.ids[None], source.straight(g)[:1]", MICROSCOPE),
    Mutant("rows of a transposed weight not turned back", "microscope/sources.py",
           "rows = rows.transpose(-1, -2) if self.turned else rows", "pass", MICROSCOPE),
    Mutant("tokens that experts see given to the next rollout", "microscope/rows.py",
           "return _sorted(owner.numel(), None, self.count, owner, ",
           "return _sorted(owner.numel(), None, self.count, owner.roll(1), ", MICROSCOPE),
    Mutant("calls of one weight not added before the products", "microscope/recorder.py",
           "rows = rows + torch.bmm(delta.transpose(1, 2), a).view_as(rows)", "pass", MICROSCOPE),
    Mutant("padding of unequal rollouts kept", "microscope/rows.py",
           "if blank and self.real is not None:", "if False:", MICROSCOPE),
    Mutant("parts of a cut group meet their neighbours alone", "batch/groups.py",
           "combinations(rows.split(most // 2), 2)", "zip(rows.split(most // 2), rows.split(most // 2)[1:])",
           OBSERVER, 2),
    Mutant("passes that cut groups apart are read", "microscope/observer.py",
           "self._apart = minibatch.joint is not minibatch.chunks", "self._apart = False", OBSERVER, 2),
    Mutant("gradients of one observer's passes left to the next before an update", "lab/step.py",
           "        one.before(minibatch)\n        minibatch.policy.clear()", "        one.before(minibatch)",
           OBSERVERS, 1),
    Mutant("gradients of one observer's passes left to the next where w is known", "lab/step.py",
           "sight.pulled)\n            minibatch.policy.clear()", "sight.pulled)\n        minibatch.policy.clear()",
           OBSERVERS, 1),
    Mutant("r_eff on squared values", "microscope/spectrum.py",
           "return float(self._unitless.sum() ** 2 / self._energy)",
           "return float(self._energy ** 2 / (self._unitless**4).sum())", READINGS),
    Mutant("conflict counts every pair", "microscope/geometry.py",
           "< -max(eps, 1e-12)).mean()", "< 2).mean()", READINGS),
    Mutant("one side of the sketch not scaled", "microscope/sketch.py", "alpha=1 / self.k", "alpha=1.0", READINGS),
    Mutant("the std of a group not averaged over tokens", "credit/units.py",
           "((credit / unit[:, None]) ** 2).sum(dim=1) / lengths", "((credit / unit[:, None]) ** 2).sum(dim=1)", UNITS),
    Mutant("KL paid for what came before", "credit/units.py",
           "log_drift(method, rollouts).flip(1).cumsum(1).flip(1)", "log_drift(method, rollouts).cumsum(1)", UNITS),
    Mutant("norms of the scores not squared", "credit/optimal_scalar.py",
           "groups.sum(reward * square)", "groups.sum(reward * square.sqrt())", UNITS),
    Mutant("return so far in place of return to go", "credit/steps.py",
           "return reward.flip(1).cumsum(1).flip(1)", "return reward.cumsum(1)", STEPS),
    Mutant("steps that do not exist counted", "credit/steps.py",
           "exists = column < rollouts.step.amax(dim=1, keepdim=True) + 1", "exists = column < reward.shape[1]", STEPS),
    Mutant("turns of all groups mixed", "credit/steps.py",
           "number * reward.shape[1] + turn", "0 * number + turn", STEPS),
    Mutant("siblings leave the tree one token late", "credit/prefixes.py",
           "at = common.clamp(min=0)", "at = (common + 1).clamp(min=0, max=width)", TREE),
    Mutant("the start's value knows its own rollout", "credit/cuts.py",
           'BASELINES["leave_one_out"]', 'BASELINES["group_mean"]', CUTS),
    Mutant("the reward forgotten at the end", "credit/cuts.py",
           "known.scatter_(1, last, reward[:, None])", "pass", CUTS),
    Mutant("lines cut before their break", "credit/cuts.py", "out[i, t + 1] =", "out[i, t] =", CUTS),
    Mutant("cut before the hesitation", "credit/spo_chain.py", ".roll(1, dims=1)", ".roll(0, dims=1)", CUTS),
    Mutant("score of the token alone, not gathered", "credit/optimal_token.py",
           "\"optimal_token\").cumsum(dim=1)", "\"optimal_token\")", SHAPES),
    Mutant("the last survivor is its own baseline", "credit/optimal_token.py",
           "alive[groups.index] <= 1, 0.0)", "alive[groups.index] <= 0, 0.0)", SHAPES),
    Mutant("credit where the policy is sure", "credit/entropy_mask.py",
           "high = entropy >= threshold(", "high = entropy <= threshold(", SHAPES),
    Mutant("good and bad answers shaped together", "credit/entropy_shaping.py",
           "for sign in (own > 0, own < 0):", "for sign in (own == own,):", SHAPES),
    Mutant("the least shared direction kept", "credit/salt.py", "[:, -rank:]", "[:, :rank]", SHAPES),
    Mutant("edge in ratio, not in log", "methods/bounds.py",
           "math.log1p(_given(m.clip_high))", "_given(m.clip_high)", OVERSHOOT),
    Mutant("slope of the link 1 at the reference, not ½", "methods/links.py",
           "return -u.new_zeros(()).logaddexp(-u)", "return u.clamp(max=0) - (-u.abs()).exp().log1p()", LINKED),
    Mutant("the rejected answer pushed up too", "objective/advantages.py", "found[first] += sign", "found[first] += 1",
           LINKED),
    Mutant("a margin of each answer alone", "objective/links.py",
           'Groups(rollouts.group).sum(own) if method.link_over == "pair" else own', "own", LINKED),
    Mutant("the reference left out of the score", "objective/links.py", "logp = logp - reference.to(logp.dtype)",
           "logp = logp - 0 * reference.to(logp.dtype)", LINKED),
    Mutant("sides of the edge swapped", "objective/bounds.py", "x - edge.high", "edge.high - x", OVERSHOOT),
    Mutant("account never restarts", "optimizer/overshoot.py",
           "torch.where(past, held + 1, 0)", "held + past.long()", OVERSHOOT),
    Mutant("lag off by one", "optimizer/overshoot.py", "(held - 1).clamp(min=0)", "held", OVERSHOOT),
    Mutant("debt of plain momentum under Nesterov", "optimizer/brakes.py",
           "self.b * self.beta / (self.a + self.b * self.gamma)", "self.beta / self.gamma", BRAKES),
    Mutant("account forgets to decay", "optimizer/brakes.py", "self._account *= mix.beta", "pass", BRAKES),
    Mutant("a stopped token takes back all of its moment, damped or not", "optimizer/brakes.py",
           "* (1 - damped) * self._account", "* self._account", BRAKES),
    Mutant("even weights forget the prompts", "objective/weights.py",
           "return 1 / (prompts * groups", "return 1 / (groups", PREFIX),
    Mutant("the clip's sides swapped in W", "methods/bounds.py",
           "s * good.where(credit > 0, bad)", "s * good.where(credit < 0, bad)", PREFIX),
    Mutant("bias correction forgotten in the replay", "optimizer/replay.py",
           "_average(grads, betas[0]) / (1 - betas[0] ** steps)", "_average(grads, betas[0])", REPLAY),
    Mutant("carry of the step after next", "optimizer/carry.py",
           "(betas[0] / betas[1] ** 0.5) ** (lag + 1)", "(betas[0] / betas[1] ** 0.5) ** (lag + 2)", REPLAY),
    Mutant("epsilon scaled the wrong way", "optimizer/scale.py", "(root + eps / phi)", "(root + eps * phi)", SCALE),
    Mutant("momentum counted as fresh", "optimizer/families.py",
           "return Parts(rate * before, rate * fresh,", "return Parts(rate * fresh, rate * before,", STATE),
    Mutant("an interval that touches the band's outside holds", "claims/verdict.py",
           "holds = low <= below and above <= high", "holds = low <= value.mean <= high", VERDICTS),
    Mutant("readings of one run decide", "claims/evidence.py",
           "return Measured(Interval(mean(values), None, None, len(values)), of)",
           "return Measured(mean_interval(values), of)", EVIDENCE),
    Mutant("noise counted as bias", "claims/turns.py",
           "float(sums.sum() ** 2 - (sums**2).sum())", "float(sums.sum() ** 2)", TURNS),
    Mutant("only right groups are dead", "claims/p1_credit.py",
           "(math.comb(right, size) + math.comb(count - right, size))", "math.comb(right, size)", RUNS),
    Mutant("the larger group less itself", "claims/p1_learning.py", "paired(upper, lower)", "paired(lower, upper)",
           RUNS),
    Mutant("norms explain what they leave", "claims/ours.py",
           "math.log(null / other), math.log(null / rank))", "math.log(other / rank), math.log(null / rank))", OURS),
    Mutant("a rank that rises has fallen", "runs/adapt.py",
           "return math.fsum(ranks[-window:]) < fall", "return math.fsum(ranks[-window:]) > fall", ADAPT),
    Mutant("credits that cancel add up in the tree", "report/prefixes.py",
           "for x in (value, np.abs(value), None))", "for x in (np.abs(value), np.abs(value), None))", NODES),
    Mutant("a fall of accuracy is a rise", "report/standing.py",
           "if change.mean < 0 else", "if change.mean > 0 else", ("tests/report/test_compare_page.py",), enough=1),
    Mutant("text goes into the page as it is", "files/markup.py",
           "html.escape(shown(str(child)), quote=True)", "shown(str(child))", MARKUP),
    Mutant("the ranks' mean forgotten", "plugins/verl/loss.py",
           "return ranks * here / float(", "return here / float(", VERL),
    Mutant("dead groups from half of the gradient", "diagnosis/signs.py",
           "norm is not None and all(exactly_zero(norm, x)", "norm is not None and any(exactly_zero(norm, x)", DOCTOR),
    Mutant("a number printed as 0.000 is 0", "diagnosis/signs.py",
           "return value == 0 and not series.resolution", "return value == 0", DOCTOR),
    Mutant("a fall counts as learning", "diagnosis/signs.py",
           'return "rose" if found.change.mean > 0 else "fell"', 'return "rose"', DOCTOR),
    Mutant("an effect may come before its cause", "diagnosis/engine.py",
           "cause.onset <= effect.onset + LATER", "True", DOCTOR, enough=2),
    Mutant("fine causes are causes", "diagnosis/engine.py",
           "if name not in seen and found[name].bad", "if name not in seen", DOCTOR),
    Mutant("green over the unread", "diagnosis/engine.py",
           "        if self.unread:\n            return", "        if False:\n            return", DOCTOR),
    Mutant("advice forgets the settings", "diagnosis/remedies.py",
           "return bool(found) and settings is not None and all(", "return False and all(", DOCTOR),
    Mutant("one reading is enough to leave the beginning", "diagnosis/onset.py",
           "min(block) > high", "max(block) > high", DOCTOR),
    Mutant("KL grows with the number of steps", "diagnosis/rules/movement.py",
           "signs.planned(log) ** 2 * values", "signs.planned(log) * values", DOCTOR, enough=2),
    Mutant("the last step is the worst", "diagnosis/rules/excess.py",
           "at = max(range(len(series)), key=lambda k: series.values[k])", "at = len(series) - 1", DOCTOR),
    Mutant("equal answers are not compared", "diagnosis/rules/reward.py",
           "share = other / count", "share = 0.0", DOCTOR),
    Mutant("what is broken is only to watch", "diagnosis/finding.py",
           '"broken" if value >= broken else "watch" if value >= watch else "fine"',
           '"watch" if value >= watch else "broken" if value >= broken else "fine"', DOCTOR),
    Mutant("right answers may be lost to their form", "diagnosis/rules/reward.py",
           "if lost.mean < FORM:", "if True:", DOCTOR),
    Mutant("a small adapter counts as frozen weights", "diagnosis/rules/movement.py",
           "many = reached.values[-1] >= REACHED if reached else", "many = share >= TRAINABLE if reached else", DOCTOR,
           enough=1),
    Mutant("tokens without w count as trained", "batch/metrics.py",
           "trained = given & trained", "trained = given", MASK),
    Mutant("the last mark hides every number", "tasks/extraction.py",
           "return min(found, key=_kind, default=None)", "return found[0] if found else None", EXTRACTION),
    Mutant("every minus is a sign", "tasks/extraction.py", "(?:(?<![\\w).])-)?", "-?", EXTRACTION, enough=2),
    Mutant("the rows of a pair do not lie beside each other", "plugins/trl/pairs.py",
           ".view(2, pairs).T.flatten()", ".view(2, pairs).flatten()", DPO_TRAINER),
    Mutant("w of a pair is that of the token before", "plugins/trl/pairs.py",
           "before = (place - 1).clamp(min=0)", "before = place.clamp(max=ids.shape[1] - 2)", DPO_TRAINER),
    Mutant("w of a pair has the sign of the loss", "plugins/trl/pairs.py",
           '-inputs.pop("pull") / scale', 'inputs.pop("pull") / scale', DPO_TRAINER),
    Mutant("an answer without a reward has the reward 0", "plugins/trl/batch.py",
           "scored = ~each.isnan().all(dim=1)", "scored = torch.ones(len(each), dtype=torch.bool)",
           ("tests/plugins/test_trl_missing.py",)),
    Mutant("other minibatches' updates are a gap of the sampler", "lab/train.py",
           "first = passes[0][0]  # later", "first = passes[0][-1]  # later",
           ("tests/lab/test_train.py::test_updates_on_other_minibatches_are_no_gap_between_sampler_and_trainer",),
           enough=1),
    Mutant("a column that is to be subtracted is added", "diagnosis/trainers/trainer.py",
           '-1 if sign == "-" else 1', "1", FOREIGN, enough=1),
    Mutant("a fork's log is read as its base's", "diagnosis/read.py",
           "if trainer.name not in through]", "if not trainer.through]", FOREIGN, enough=1),
    Mutant("an answer's tokens begin with its prompt", "offline/foreign.py",
           "first = mask.index(True)", "first = 0", ("tests/offline/test_foreign.py",), enough=1),
    Mutant("rewards of an episode have no weight", "offline/foreign.py",
           '* number_of(each.get("weight", 1.0), name, bad)', "* 1.0", ("tests/offline/test_foreign.py",), enough=1),
    Mutant("one half of the rollouts proves all", "microscope/proof.py",
           "for bit in range((rollouts - 1).bit_length())]", "for bit in range(1)]", PLANTED),
    Mutant("rows over ranks are proven by their total alone", "microscope/proof_ranks.py",
           "            if not sums.error <= tolerance:", "            if False:",
           ("tests/distributed/test_ranks.py::test_a_planted_fault_of_rows_is_raised_on_all_ranks",), enough=2),
    Mutant("every rank proves the first rank's half", "microscope/proof_ranks.py",
           "mine = half[first : first + rollouts]", "mine = half[:rollouts]",
           ("tests/distributed/test_ranks.py::test_right_rows_of_all_ranks_are_proven_to_rounding",)),
    Mutant("ZeRO is read at every micro-batch", "plugins/trl/zero.py",
           "if engine.is_gradient_accumulation_boundary():", "if True:", ZERO, enough=1),
    Mutant("an engine's hooks run in our own passes", "plugins/common/untouched.py",
           "                held.clear()", "                held.copy()", ZERO, enough=1),
    Mutant("links out of a record are followed", "files/guards.py",
           "if path.is_symlink() and", "if False and", HOSTILE),
    Mutant("a copy's checkpoint is ahead of its lines", "runs/mirror.py",
           'late = self._new(files, "checkpoints/*")\n            lines, whole, reach = self._new_lines()',
           'lines, whole, reach = self._new_lines()\n            late = self._new(files, "checkpoints/*")',
           MIRROR, enough=1),
    Mutant("a copy's line is ahead of its files", "runs/mirror.py",
           "for unit, opened in first + early:", "for unit, opened in first:", MIRROR, enough=1),
    Mutant("a copy has files before it has a run.json", "runs/mirror.py",
           "for unit, opened in first + early:", "for unit, opened in early + first:", MIRROR, enough=1),
    Mutant("a rewound file is appended to", "runs/mirror.py",
           "whole = self._newest is None or file.read(len(newest)) != newest", "whole = self._newest is None",
           MIRROR, enough=1),
    Mutant("a node may name any path", "runs/mirror.py",
           "if not (folder or UNIT.fullmatch(piece.path)):", "if False:", MIRROR),
    Mutant("the implicit prompt takes the space before the answer", "batch/pairs.py",
           'return at - 1 if at > 0 and chosen[at - 1] == " " and chosen[at] != rejected[at] else at', "return at",
           PAIR_FILE, 1),
    Mutant("the preference turned round", "lab/reward.py", "logsigmoid(chosen - rejected)",
           "logsigmoid(rejected - chosen)", REWARD, 1),
    Mutant("the padding is scored", "policy/reward_model.py", "torch.where(counts, column, 0).cummax(dim=1).values",
           "column.expand_as(ids).contiguous()", ("tests/policy/test_reward_model.py",), 1),
    Mutant("the learned reward is recorded as gold", "lab/rollout.py", "gold=rollouts.reward, lost",
           "gold=reward, lost", REWARD, 1),
    Mutant("continuations judged by the verifier under a learned reward", "lab/tools.py",
           "if self._learned is not None:\n            tokens", "if False:\n            tokens", REWARD, 1),
    Mutant("differences of the score without their baseline", "credit/prefix_score.py",
           "centred(method, sums, group, rollouts.mask, rollouts.lengths)", "sums",
           ("tests/credit/test_prefix_score.py",), 1),
    Mutant("gold that rises is called a hack", "diagnosis/rules/reward.py", "lost = -since.change.mean / best.mean",
           "lost = abs(since.change.mean) / best.mean", ("tests/diagnosis/test_rules_reward.py",), 1),
]


def fixed(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A bug that was found and fixed: `old` is the fix."""
    return Mutant(name, file, old, new, tests, enough=1)


LIMITS, DAMAGE = "tests/fuzz/test_limits.py", "tests/faults/test_damage.py"
CALLBACK, MANY = "tests/plugins/test_trl_callback.py", "tests/load/test_many.py"
REWARDS, SIZES, TRAINING = ("tests/stress/test_rewards.py", "tests/stress/test_geometry_at_the_edge.py",
                            "tests/stress/test_training.py")
MODELS, PAGES, STRANGERS = ("tests/security/test_models.py", "tests/security/test_pages.py",
                            "tests/security/test_records.py")
NAMED = f"{DAMAGE}::test_a_damaged_file_is_named_by_whoever_reads_it_and_no_number_is_another"
FUZZ = "tests/fuzz/test_strangers_bytes.py"
SETTINGS = "tests/lab/test_train.py::test_settings_that_cannot_work_are_refused_before_anything_starts"

REPLANTED = [
    # Numbers of any size.
    fixed("squares of a group's rewards overflow and vanish", "batch/groups.py",
          "unit = binary_unit(self.largest(centred))", "unit = torch.ones_like(centred)", REWARDS),
    fixed("infinite advantages are given out", "objective/advantages.py", "if bool(bad.any()):", "if False:", REWARDS),
    fixed("products of tiny gradients vanish", "microscope/gram.py",
          "unit = binary_unit(rows.abs().max()) if rows.numel() else rows.new_ones(())", "return gram", SIZES),
    fixed("squared norms of tiny gradients vanish", "microscope/gram.py",
          "for i in ((totals < SQUARABLE[0]) | ~(totals < SQUARABLE[1])).nonzero().flatten().tolist():",
          "for i in ():", SIZES),
    fixed("rows that were turned in place are read in the order of the batch", "microscope/watch.py",
          "usual = type(x) is Tensor and id(x) not in self._known \\\n", "usual = type(x) is Tensor \\\n",
          "tests/microscope/test_linear.py"),
    fixed("with segments a product on rows of another width fails in the backward", "microscope/watch.py",
          "or rows is None or rows.by_position or", "or rows is None or", "tests/microscope/test_linear.py"),
    fixed("a Gram of NaN passes the self-check", "microscope/scope.py",
          "if not check.error <= check.tolerance:", "if check.error > check.tolerance:", PLANTED[0]),
    fixed("an update that makes weights NaN is kept", "lab/setup.py",
          "if spoilt is not None:", "if False:", TRAINING),
    fixed("why a run stopped is not recorded", "runs/stopped.py",
          "{schema.RUN_STOPPED: str(error)}", "{}", TRAINING),
    # TRL, and means over several passes.
    fixed("a group that is all masked is passed through the model", "plugins/trl/callback.py",
          "ids = torch.unique(window.rollouts.group[window.rollouts.mask.any(dim=1)])",
          "ids = torch.unique(window.rollouts.group)",
          f"{CALLBACK}::test_a_group_of_answers_that_are_all_masked_does_not_hide_the_others"),
    fixed("readings that some groups lack are weighed by all live groups", "microscope/observer.py",
          "if len(blocks) < 2:", "if blocks:",
          f"{CALLBACK}::test_means_over_groups_do_not_hang_on_how_many_share_a_pass"),
    fixed("TRL's rows are not proven", "plugins/common/observer.py",
          "self.proofs.run(due, self.scope, pull, rollouts)", "pass",
          f"{CALLBACK}::test_rows_under_wrong_names_are_found_out_at_the_first_reading_and_none_is_believed"),
    # Files of strangers.
    fixed("metadata of a parquet file are read in this process", "offline/files.py",
          "    found = subprocess.run(",
          "    import pyarrow.parquet\n"
          "    for about in map(pyarrow.parquet.read_metadata, files):\n"
          "        [about.row_group(0).column(i) for i in range(about.num_columns)]\n"
          "    found = subprocess.run(",
          f"{LIMITS}::test_a_parquet_file_whose_columns_lie_about_themselves_ends_no_process"),
    fixed("JSON of any depth is read", "files/jsonlines.py", "        if level:", "        if False:",
          f"{LIMITS}::test_a_value_as_deep_as_allowed_is_read_and_one_level_more_is_refused"),
    fixed("an option may be an integer of 400 digits", "files/specs.py",
          "huge = isinstance(number, int) and abs(number) > LARGEST", "huge = False", FUZZ),
    fixed("an error repeats an option of any length", "files/specs.py", "got {value!r:.60}", "got {value!r}",
          f"{LIMITS}::test_an_odd_option_is_one_short_sentence"),
    fixed("a setting may be an integer of 400 digits", "runs/settings.py",
          "huge = isinstance(value, int) and abs(value) > LARGEST", "huge = False", SETTINGS),
    fixed("evidence may hold an integer of 400 digits", "claims/evidence.py",
          "except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:",
          "except (KeyError, ValueError, TypeError, AttributeError) as error:", "tests/claims/test_evidence.py"),
    fixed("ranks below 1/2 are believed", "claims/ours.py", "if min(null, other, rank) > 0.5]", "]", FUZZ),
    fixed("settings of a record may be of any kind", "cli/check.py",
          "raise CreditscopeError(f\"{place}: {name} is", "CreditscopeError(f\"{place}: {name} is",
          "tests/cli/test_check.py"),
    fixed("YAML of strangers may have tags", "diagnosis/readers/text.py",
          "yaml.AliasToken | yaml.TagToken", "yaml.AliasToken",
          f"{LIMITS}::test_yaml_that_no_trainer_writes_is_refused_in_a_sentence"),
    fixed("YAML may hold a number longer than Python writes", "diagnosis/readers/text.py",
          "json.dumps(found, default=str)", "pass",
          f"{LIMITS}::test_yaml_that_no_trainer_writes_is_refused_in_a_sentence"),
    fixed("every column of a table is read for every row", "diagnosis/readers/contents.py",
          "enumerate(names) if is_read(name)}", "enumerate(names)}",
          f"{LIMITS}::test_the_doctor_takes_time_in_proportion_to_the_log"),
    fixed("a prompt is read once for each choice", "offline/dumps.py",
          "name, bad), prompt=prompt,", "name, bad), prompt=prompt_of(messages['messages'], bad),",
          f"{LIMITS}::test_many_choices_to_a_long_chat_take_time_in_proportion_to_the_line"),
    fixed("steps are padded without bound", "batch/jsonl.py",
          'for name in ("tokens", "step_reward"):', 'for name in ("tokens",):',
          f"{LIMITS}::test_a_long_answer_beside_many_short_ones_is_refused_before_it_is_padded"),
    fixed("lone surrogates in rollouts reach the tokenizer", "offline/assemble.py",
          "except (UnicodeEncodeError, TypeError):", "except ZeroDivisionError:", "tests/offline/test_scope.py"),
    fixed("a name too long for a file is an OSError", "claims/evidence.py",
          "except OSError as error:\n            raise CreditscopeError(f\"cannot look",
          "except PermissionError as error:\n            raise CreditscopeError(f\"cannot look",
          "tests/report/test_report_verb.py"),
    fixed("transformers may ask to run a model's code", "policy/loading.py",
          'extra = extra | {"trust_remote_code": False}', "extra = dict(extra)", MODELS),
    fixed("an index may name any file", "policy/vetting.py",
          'if Path(file).name != file or not file.endswith(".safetensors"):', "if False:", MODELS),
    fixed("a config may name a kernel of the hub", "policy/vetting.py", 'and "/" in json.dumps(value):', "and False:",
          MODELS),
    fixed("adapters may name a model anywhere", "policy/vetting.py",
          'if (folder / "adapter_config.json").exists():', "if False:", MODELS),
    fixed("missing weights are random numbers", "policy/loading.py",
          'if missing := sorted(loaded["missing_keys"]):', "if missing := []:", MODELS),
    fixed("a GGUF file may declare more than it holds", "policy/vetting.py",
          "if count * each > self.size - before:", "if False:", MODELS),
    # Records of strangers, and what is shown of them.
    fixed("a lock that is a link empties its target", "files/writing.py",
          "        lock.acquire()\n", '        (path / "run.lock").open("w").close()\n        lock.acquire()\n',
          f"{STRANGERS}::test_a_lock_that_is_a_link_empties_no_other_file"),
    fixed("an npz file unpacks to gigabytes", "files/guards.py", "if size > most:", "if False:",
          f"{STRANGERS}::test_an_archive_that_would_unpack_to_gigabytes_is_refused_before_it_is_unpacked"),
    fixed("an npz file lies about its size", "files/guards.py", "data.read(part.file_size)", "data.read()",
          f"{STRANGERS}::test_an_archive_that_lies_about_its_size_gives_no_more_than_it_said"),
    fixed("JSON on a terminal has control characters", "cli/output.py",
          'print("".join(c if c.isprintable() or c == "\\n" else json.dumps(c)[1:-1] for c in text))', "print(text)",
          f"{STRANGERS}::test_json_escapes_what_a_terminal_would_obey_and_reads_back_the_same"),
    fixed("a terminal obeys a record's control characters", "cli/output.py",
          "super().render_str(printable(text), **options)", "super().render_str(text, **options)",
          f"{STRANGERS}::test_no_command_prints_a_control_character_of_a_hostile_record"),
    fixed("a page offers any command to paste", "report/header.py",
          'return words[:1] == ["creditscope"] and shlex.join(words) == command', "return True", PAGES),
    fixed("a script that others can write is trusted", "report/page.py", "st_mode & 0o022", "st_mode & 0", PAGES),
    fixed("passwords reach run.json", "runs/record.py",
          'run = {"format": FORMAT, "config": masked(dict(config)),',
          'run = {"format": FORMAT, "config": dict(config),',
          f"{STRANGERS}::test_passwords_and_keys_in_settings_do_not_reach_the_record"),
    # Long runs.
    fixed("the lab keeps every step's metrics", "lab/train.py",
          '        if config.adapt != "none":\n            self.lines.append(line)', "        self.lines.append(line)",
          "tests/load/test_soak.py"),
    fixed("a page that follows a run reads everything anew", "report/watch.py",
          "before = remembered.set(self._looks)", "before = remembered.set({})",
          f"{MANY}::test_a_page_that_follows_a_run_remembers_its_readings"),
    fixed("remembered readings grow without bound", "claims/evidence.py", "and len(known) < LOOKS:", "and True:",
          f"{MANY}::test_what_is_remembered_of_readings_is_bounded"),
    fixed("the doctor judges a log by its start", "diagnosis/readers/rows.py",
          "rows = [*self._first, *self._last]", "rows = self._first", "tests/diagnosis/test_read.py"),
    fixed("--keep-most keeps all", "runs/record.py",
          "                    if kept % apart:", "                    if False:",
          f"{MANY}::test_a_reading_with_keep_most_keeps_so_many_files"),
    # Kills and damage.
    fixed("what a kill left blocks a new run", "runs/place.py",
          "for entry in path.iterdir() if not _scrap(entry))", "for entry in path.iterdir())",
          f"{DAMAGE}::test_what_a_kill_leaves_before_run_json_is_no_obstacle_to_starting_there"),
    fixed("a new run looks before it locks", "runs/record.py",
          "lock = lock_folder(path)\n        try:\n            cls._require_no_steps(path)  # under the lock: another "
          "process may have run here meanwhile\n",
          "cls._require_no_steps(path)\n        lock = lock_folder(path)\n        try:\n",
          f"{DAMAGE}::test_a_run_that_starts_and_ends_while_another_is_about_to_start_is_not_written_over"),
    fixed("a checkpoint is deleted under its name", "files/writing.py",
          "    path.replace(part)\n    shutil.rmtree(part)", "    shutil.rmtree(path)",
          f"{DAMAGE}::test_half_a_checkpoint_never_has_a_checkpoints_name"),
    fixed("an old checkpoint stays for ever", "runs/record.py",
          "for old in self.checkpoints()[:-KEEP]:", "for old in ():",
          f"{DAMAGE}::test_an_old_checkpoint_that_a_kill_kept_from_going_goes_when_the_run_goes_on"),
    fixed("a step's line comes before its kept rollouts", "lab/train.py",
          "        if updates and config.keep_every and step % config.keep_every == 0:\n"
          "            record.save_group(step, kept_arrays(self.method, rollouts, credit, w, live, after, also,\n"
          "                                                self.policy.special()))\n"
          "        self.write(step, record, line)",
          "        self.write(step, record, line)\n"
          "        if updates and config.keep_every and step % config.keep_every == 0:\n"
          "            record.save_group(step, kept_arrays(self.method, rollouts, credit, w, live, after, also,\n"
          "                                                self.policy.special()))",
          NAMED),
    fixed("a flipped bit of run.json is believed", "runs/record.py",
          "if told is not None and told != _crc(json.dumps(run).encode()):", "if False:",
          f"{DAMAGE}::test_no_flipped_bit_changes_what_a_record_says"),
    fixed("a flipped digit of a step is believed", "runs/record.py",
          "if tail != f'{_crc(body)}\"}}'.encode() if sealed else _SUM.search(line):", "if False:",
          f"{DAMAGE}::test_no_flipped_bit_changes_what_a_record_says"),
    fixed("a flipped weight is trained on", "lab/checkpoint.py", "        verify(folder)", "        pass",
          f"{DAMAGE}::test_a_flipped_weight_is_noticed_and_without_the_sums_it_would_be_trained_on"),
    fixed("a steps file that was cut resumes with a hole", "runs/record.py",
          "if taken and (last is None or last < taken - 1):", "if False:",
          f"{DAMAGE}::test_a_steps_file_that_was_cut_at_a_line_is_shorter_than_its_checkpoint_and_says_so"),
    fixed("a resume into a read-only folder forgets steps first", "runs/record.py",
          "if not os.access(place, os.W_OK,", "if False and not os.access(place, os.W_OK,",
          f"{DAMAGE}::test_a_record_that_becomes_read_only_ends_the_run_in_words_and_can_be_read"),
    fixed("a removed npz file is absent without a word", "runs/record.py",
          "gone = self.missing(steps)", "gone: list[str] = []",
          NAMED),
    fixed("sums of a trained model are not compared", "policy/loading.py", "            verify(path, whole=False)",
          "            pass", f"{DAMAGE}::test_a_model_that_was_damaged_after_the_run_is_not_trained_on"),
    # Words instead of tracebacks.
    fixed("Ctrl-C while the program loads is a traceback", "__main__.py",
          "except KeyboardInterrupt:", "except ZeroDivisionError:",
          "tests/faults/test_signals.py::test_ctrl_c_while_a_command_is_loading_is_no_traceback"),
    fixed("--lr 1e38 reaches torch", "runs/settings.py", "0 <= value <= MOST:", "0 <= value < float('inf'):",
          SETTINGS),
    fixed("sampling follows torch's default dtype", "policy/sampling.py",
          "floats = {name: torch.zeros(shape, device=device, dtype=torch.float32)",
          "floats = {name: torch.zeros(shape, device=device)", "tests/policy/test_sampling.py"),
    fixed("a fault before the first page drops the watcher", "report/watch.py",
          "except Exception as error:  # the run may not", "except ZeroDivisionError as error:  # the run may not",
          "tests/report/test_watch.py"),
    # Fixes that no test held until they were planted again.
    fixed("the norm of a tiny gradient reads 0", "lab/step.py", "if norm >= VANISHING", "if True", TRAINING),
    fixed("a whole number of 400 digits is a step's metric", "runs/record.py",
          "type(value) is int and abs(value) >= 2**63]", "False]", "tests/runs/test_record.py"),
    fixed("a YAML number in base 60 is computed", "diagnosis/readers/text.py",
          'token.value.count(":") > 20', "False", "tests/diagnosis/test_read.py"),
    fixed("the lab proves no reading", "microscope/observer.py",
          "self.proofs.run(due, self.scope, partial(pull, rows=rows), len(rows))", "pass",
          "tests/microscope/test_observer.py"),
    fixed("each pass decides by itself whether answers are right or wrong", "microscope/observer.py",
          "(reward == 0) | (reward == 1)", "(reward[rows] == 0) | (reward[rows] == 1)",
          "tests/microscope/test_observer.py"),
    fixed("lone surrogates of a task reach the tokenizer", "tasks/jsonl.py",
          "if not encodable(value):", "if False:", "tests/tasks/test_jsonl.py"),
    fixed("lone surrogates of ProcessBench reach the tokenizer", "studies/processbench.py",
          "if not all(map(encodable,", "if False and all(map(encodable,", "tests/studies/test_localise.py"),
]
"""Bugs of docs/reliability.md ("What it found") that one change of one file brings back."""

ALL = [*MUTANTS, *REPLANTED]


def control() -> Mutant:
    """Nothing planted, and every test that guards a mutant; a single test only where its file is not there whole."""
    tests = {test for mutant in ALL for test in mutant.tests}
    tests = {test for test in tests if "::" not in test or test.partition("::")[0] not in tests}
    return Mutant("nothing planted (the control: no test may be red)", "errors.py", "from __future__",
                  "from __future__", tuple(sorted(tests)), enough=1)


CONTROL = control()
ARCHITECTURES = ("llama", "qwen2", "gpt2", "mixtral", "qwen3_moe", "gpt_oss")
WARM = ("torch", "transformers", "pytest", "hypothesis", "rich", "tyro",
        *(f"transformers.models.{name}.modeling_{name}" for name in ARCHITECTURES))
"""What every mutant's tests load, so that it is loaded once."""


def plant(mutant: Mutant, folder: Path) -> None:
    """A copy of the package with the mutant in it. Compiled files are copied too: their sources keep their times."""
    package = folder / "creditscope"
    shutil.copytree(ROOT / "src" / "creditscope", package)
    source = (package / mutant.file).read_text()
    if (count := source.count(mutant.old)) != 1:
        raise SystemExit(f"mutant {mutant.name!r}: its text stands {count} times in {mutant.file}, not once; "
                         f"bring tests/mutants.py up to date")
    (package / mutant.file).write_text(source.replace(mutant.old, mutant.new))


class Count:
    """Red tests, and red cases of tests that hold many; enough of them end the session."""

    def __init__(self, enough: int) -> None:
        self.red, self.enough = 0, enough

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        import pytest

        if call.excinfo is not None and not call.excinfo.errisinstance((pytest.skip.Exception, pytest.xfail.Exception)):
            self.red += getattr(call.excinfo.value, "count", 1)
            if self.red >= self.enough:
                item.session.shouldstop = "enough"


def run_tests(mutant: Mutant, folder: Path) -> None:
    """In the forked process: the mutant's tests, with its copy of the package before the real one."""
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "CREDITSCOPE_MUTANT": mutant.name}  # for processes that a test starts too
    os.chdir(ROOT)
    with (folder / "output").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import pytest

    count = Count(mutant.enough)
    code = pytest.main([*mutant.tests, "-p", "no:cacheprovider", "--no-header", "-m", "not nightly"], plugins=[count])
    import creditscope

    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) and \
            Path(creditscope.__file__).is_relative_to(folder):
        (folder / "red").write_text(str(count.red))
    sys.stdout.flush()
    os._exit(0)


def outcome(folder: Path, status: int) -> int:
    """How many tests and cases were red; -1 where the suite did not run. A test that aborts the process is red."""
    if (folder / "red").exists():
        return int((folder / "red").read_text())
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
        return 1
    print((folder / "output").read_text(errors="replace")[-2000:])
    return -1


def reds(mutants: list[Mutant]) -> Iterator[tuple[Mutant, int, float]]:
    """Each mutant with the number of tests that it turned red, as they end."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: two mutants run side by side
    for name in WARM:
        importlib.import_module(name)
    waiting, running = list(mutants), {}
    with tempfile.TemporaryDirectory(prefix="creditscope-mutants-") as place:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                mutant = waiting.pop(0)
                folder = Path(place) / str(len(waiting))
                plant(mutant, folder)
                if not (child := os.fork()):
                    run_tests(mutant, folder)
                running[child] = mutant, folder, time.monotonic()
            child, status = os.wait()
            mutant, folder, start = running.pop(child)
            yield mutant, outcome(folder, status), time.monotonic() - start
            shutil.rmtree(folder)


def git(*args: str) -> list[str]:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def changed() -> set[str]:
    """Files that differ from where this branch left main, committed or not; on main itself, from the commit before."""
    base = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main")
    if base == git("rev-parse", "HEAD"):
        base = git("rev-parse", "HEAD~1")
    return {*git("diff", "--name-only", *base), *git("ls-files", "--others", "--exclude-standard")}


def main() -> int:
    given = argparse.ArgumentParser(description="Plant bugs and count the tests that turn red.")
    given.add_argument("word", nargs="?", default="", help="only mutants of files whose name holds it")
    given.add_argument("--changed", action="store_true", help="only mutants whose formula or tests changed")
    given.add_argument("--table", type=Path, metavar="FILE", help="write what was found as Markdown (docs/planted.md)")
    args = given.parse_args()
    chosen = [mutant for mutant in ALL if args.word in mutant.file]
    if not chosen:
        raise SystemExit(f"no mutant stands in a file with {args.word!r} in its name")
    if args.changed:
        files = changed()
        chosen = [mutant for mutant in chosen if files & {f"src/creditscope/{mutant.file}", *mutant.files}]
        print(f"{len(chosen)} of {len(ALL)} mutants stand in files that changed or are guarded by tests that did")
    wrong, found = 0, {}
    for mutant, count, seconds in reds([CONTROL, *chosen] if len(chosen) == len(ALL) else chosen):
        right = count == 0 if mutant is CONTROL else count >= mutant.enough
        wrong += not right
        found[mutant.name] = count
        print(f"{'ok  ' if right else 'WEAK'} {count:4d} red  {seconds:5.1f} s  {mutant.name}", flush=True)
    if args.table:
        args.table.write_text(table(found))
    return 1 if wrong else 0


def table(found: dict[str, int]) -> str:
    """Every planted bug with the number of tests and cases of `make test` that turned red."""
    lines = ["# Planted bugs", "",
             "Written by `python tests/mutants.py --table docs/planted.md`. Each bug is planted in a copy of the",
             "package and met by the tests of its part of `make test`; counting ends when enough are red: three,",
             "or one where the bug was found and fixed before, or where its own test is enough.", "",
             "| planted | in | red in `make test` |", "|---|---|---:|"]
    lines += [f"| {mutant.name} | {mutant.file} | {found[mutant.name]} |" for mutant in ALL if mutant.name in found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
