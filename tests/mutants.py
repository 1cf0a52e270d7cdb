"""Plant a bug in a formula and count the tests that turn red: a suite that stays green guards nothing.

    python tests/mutants.py              every mutant must turn at least three tests or cases red; else exit code 1
    python tests/mutants.py credit       only those of files whose name holds that word
    python tests/mutants.py --changed    only those whose formula or whose tests differ from the main branch

Each mutant is one textual change in a copy of the package. It runs in a process forked from one that has loaded torch
and transformers but not creditscope, two at a time, against the tests of its part that `make test` runs, until enough
of them are red.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: two mutants run side by side

ROOT = Path(__file__).resolve().parent.parent
FORMULAS = ("tests/test_advantages.py", "tests/test_objective.py", "tests/test_p2_table.py")
MICROSCOPE = ("tests/microscope/test_operations.py", "tests/microscope/test_regimes.py",
              "tests/microscope/test_families.py")
READINGS = ("tests/microscope/test_geometry.py", "tests/microscope/test_spectrum.py", "tests/microscope/test_sketch.py")
UNITS = ("tests/credit/test_units.py", "tests/credit/test_outcome.py", "tests/credit/test_gae.py")
STEPS, TREE, CUTS = ("tests/credit/test_steps.py",), ("tests/credit/test_prefixes.py",), ("tests/credit/test_cuts.py",)
SHAPES = ("tests/credit/test_optimal_token.py", "tests/credit/test_entropy.py", "tests/credit/test_salt.py")
OVERSHOOT, BRAKES = ("tests/test_edges.py", "tests/optimizer/test_overshoot.py"), ("tests/optimizer/test_brakes.py",)
PREFIX, REPLAY = ("tests/test_prefix_bias.py",), ("tests/optimizer/test_replay.py",)
SCALE, STATE = ("tests/optimizer/test_scale.py",), ("tests/optimizer/test_state.py", "tests/optimizer/test_probe.py")
VERDICTS, RUNS = ("tests/claims/test_verdict.py",), ("tests/claims/test_p1_runs.py",)
EVIDENCE, TURNS = ("tests/claims/test_evidence.py", *RUNS), ("tests/claims/test_turns.py",)
OURS, ADAPT = ("tests/claims/test_ours.py",), ("tests/lab/test_adapt.py",)
NODES, ANSWERS = ("tests/report/test_prefixes.py",), ("tests/report/test_answers.py",)
MARKUP, DOCTOR = ("tests/report/test_markup.py", "tests/report/test_header.py"), ("tests/doctor/test_rules.py",)
VERL = ("tests/plugins/test_verl_loss.py",)
PLANTED, HOSTILE = ("tests/stress/test_planted.py",), ("tests/security/test_records.py",)
ENOUGH = 3


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = FORMULAS


MUTANTS = [
    Mutant("sign of the advantage flipped", "advantages.py",
           "centred = reward - BASELINES", "centred = -reward + BASELINES"),
    Mutant("clip bounds swapped", "ratios.py",
           "else s.clamp(low, high)", "else s.clamp(2 - high if high else None, 2 - low if low else None)"),
    Mutant("mask dropped from the weight", "weights.py",
           "mask = rollouts.mask & keep[:, None]", "mask = torch.ones_like(rollouts.mask) & keep[:, None]"),
    Mutant("mask dropped from the sequence ratio", "ratios.py",
           "log_ratio.sum(dim=1, keepdim=True) / mask.sum(", "log_ratio.sum(1, True) / torch.ones_like(mask).sum("),
    Mutant("min turned into max", "ratios.py", "objective = torch.minimum(", "objective = torch.maximum("),
    Mutant("std of the other kind", "advantages.py", 'return 1 if method.std == "sample" else 0', "return 0"),
    Mutant("leave-one-out keeps the one", "advantages.py", "others = groups.size - 1", "others = groups.size"),
    Mutant("token mean over padding too", "weights.py",
           "(length * counted).sum().clamp(min=1)", "torch.tensor(len(length) * width)"),
    Mutant("KL pulls the wrong way", "objective.py", "value = value - method.beta", "value = value + method.beta"),
    Mutant("stop-gradient forgotten", "ratios.py",
           "log_ratio, mask)).detach() * credit", "log_ratio, mask)) * credit"),
    Mutant("dropped groups still counted", "weights.py",
           'if method.denominator == "kept" else', 'if method.denominator == "never" else'),
    Mutant("unanimous groups not guarded", "advantages.py",
           "centred.masked_fill(groups.unanimous(reward) & ~raw, 0.0)", "centred"),
    Mutant("rows of the tied head and its embedding not crossed", "microscope/gram.py",
           "gram += cross + cross.t()", "pass", MICROSCOPE),
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
    Mutant("edge in ratio, not in log", "edges.py", "math.log1p(method.clip_high)", "method.clip_high", OVERSHOOT),
    Mutant("sides of the edge swapped", "edges.py", "x - edge.high", "edge.high - x", OVERSHOOT),
    Mutant("account never restarts", "optimizer/overshoot.py",
           "torch.where(past, held + 1, 0)", "held + past.long()", OVERSHOOT),
    Mutant("lag off by one", "optimizer/overshoot.py", "(held - 1).clamp(min=0)", "held", OVERSHOOT),
    Mutant("debt of plain momentum under Nesterov", "optimizer/brakes.py",
           "self.b * self.beta / (self.a + self.b * self.gamma)", "self.beta / self.gamma", BRAKES),
    Mutant("account forgets to decay", "optimizer/brakes.py", "self._account *= mix.beta", "pass", BRAKES),
    Mutant("a stopped token takes back all of its moment, damped or not", "optimizer/brakes.py",
           "* (1 - damped) * self._account", "* self._account", BRAKES),
    Mutant("even weights forget the prompts", "weights.py",
           "return 1 / (prompts * groups", "return 1 / (groups", PREFIX),
    Mutant("the clip's sides swapped in W", "prefix_bias.py",
           "torch.where(credit > 0, s <= high", "torch.where(credit < 0, s <= high", PREFIX),
    Mutant("bias correction forgotten in the replay", "optimizer/replay.py",
           "_average(grads, betas[0]) / (1 - betas[0] ** steps)", "_average(grads, betas[0])", REPLAY),
    Mutant("carry of the step after next", "optimizer/replay.py",
           "(betas[0] / betas[1] ** 0.5) ** (lag + 1)", "(betas[0] / betas[1] ** 0.5) ** (lag + 2)", REPLAY),
    Mutant("epsilon scaled the wrong way", "optimizer/scale.py", "(root + eps / phi)", "(root + eps * phi)", SCALE),
    Mutant("momentum counted as fresh", "optimizer/state.py",
           "return Parts(rate * before, rate * fresh,", "return Parts(rate * fresh, rate * before,", STATE),
    Mutant("an interval that touches the band's outside holds", "claims/verdict.py",
           "if low <= value.low and value.high <= high:", "if low <= value.mean <= high:", VERDICTS),
    Mutant("readings of one run decide", "claims/evidence.py",
           "return Interval(math.fsum(values) / len(values), None, None, len(values)), some(unit, len(known))",
           "return mean_interval(values), some(unit, len(known))", EVIDENCE),
    Mutant("noise counted as bias", "claims/turns.py",
           "float(sums.sum() ** 2 - (sums**2).sum())", "float(sums.sum() ** 2)", TURNS),
    Mutant("only right groups are dead", "claims/p1_runs.py",
           "(math.comb(right, size) + math.comb(count - right, size))", "math.comb(right, size)", RUNS),
    Mutant("the larger group less itself", "claims/p1_runs.py", "paired(upper, lower)", "paired(lower, upper)", RUNS),
    Mutant("norms explain what they leave", "claims/ours.py",
           "math.log(null / other), math.log(null / rank))", "math.log(other / rank), math.log(null / rank))", OURS),
    Mutant("a rank that rises has fallen", "lab/adapt.py",
           "return math.fsum(ranks[-window:]) < fall", "return math.fsum(ranks[-window:]) > fall", ADAPT),
    Mutant("credits that cancel add up in the tree", "report/prefixes.py",
           "for x in (value, np.abs(value), None))", "for x in (np.abs(value), np.abs(value), None))", NODES),
    Mutant("a fall of accuracy is a rise", "report/answers.py",
           "if last.mean < first.mean else", "if last.mean > first.mean else", ANSWERS),
    Mutant("text goes into the page as it is", "report/markup.py",
           "html.escape(shown(str(child)), quote=True)", "shown(str(child))", MARKUP),
    Mutant("the ranks' mean forgotten", "plugins/verl/loss.py",
           "return ranks * here / float(", "return here / float(", VERL),
    Mutant("dead groups from half of the gradient", "doctor/rules.py",
           "return norm is not None and max(norm.values) == 0", "return norm is not None and min(norm.values) == 0",
           DOCTOR),
    Mutant("one half of the rollouts proves all", "microscope/proof.py",
           "for bit in range((rollouts - 1).bit_length())]", "for bit in range(1)]", PLANTED),
    Mutant("links out of a record are followed", "strangers.py",
           "if path.is_symlink() and", "if False and", HOSTILE),
]


CONTROL = Mutant("nothing planted (the control: no test may be red)", "errors.py", "from __future__",
                 "from __future__", tuple(sorted({test for mutant in MUTANTS for test in mutant.tests})))
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

    def __init__(self) -> None:
        self.red = 0

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        import pytest

        if call.excinfo is not None and not call.excinfo.errisinstance((pytest.skip.Exception, pytest.xfail.Exception)):
            self.red += getattr(call.excinfo.value, "count", 1)
            if self.red >= ENOUGH:
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

    count = Count()
    code = pytest.main([*mutant.tests, "-p", "no:cacheprovider", "--no-header", "-m", "not nightly"], plugins=[count])
    import creditscope

    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) and \
            Path(creditscope.__file__).is_relative_to(folder):
        (folder / "red").write_text(str(count.red))
    sys.stdout.flush()
    os._exit(0)


def outcome(folder: Path) -> int:
    """How many tests and cases were red; -1 where the suite did not run."""
    if (folder / "red").exists():
        return int((folder / "red").read_text())
    print((folder / "output").read_text(errors="replace")[-2000:])
    return -1


def reds(mutants: list[Mutant]) -> Iterator[tuple[Mutant, int, float]]:
    """Each mutant with the number of tests that it turned red, as they end."""
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
            child, _ = os.wait()
            mutant, folder, start = running.pop(child)
            yield mutant, outcome(folder), time.monotonic() - start
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
    args = given.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.word in mutant.file]
    if not chosen:
        raise SystemExit(f"no mutant stands in a file with {args.word!r} in its name")
    if args.changed:
        files = changed()
        chosen = [mutant for mutant in chosen if files & {f"src/creditscope/{mutant.file}", *mutant.tests}]
        print(f"{len(chosen)} of {len(MUTANTS)} mutants stand in files that changed or are guarded by tests that did")
    wrong = 0
    for mutant, count, seconds in reds([CONTROL, *chosen] if len(chosen) == len(MUTANTS) else chosen):
        right = count == 0 if mutant is CONTROL else count >= ENOUGH
        wrong += not right
        print(f"{'ok  ' if right else 'WEAK'} {count:4d} red  {seconds:5.1f} s  {mutant.name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
