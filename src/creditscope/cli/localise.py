"""`creditscope papers localise`: how well credit marks the wrong step of a solution."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from creditscope.cli.output import Output
from creditscope.cli.progress import Progress
from creditscope.credit.table import ESTIMATORS
from creditscope.errors import CreditscopeError, require_module
from creditscope.files.hub import refuse_missing

if TYPE_CHECKING:
    from creditscope.studies.localise import StudyResult

PROBLEMS = 200
TITLES = {"planted": "planted errors: one wrong number in a reference solution, all later lines follow from it",
          "own": "for control, the policy's own errors: the first line that the verifier marks wrong",
          "processbench": "solutions of other models, with the first wrong step marked by people"}


@dataclass(frozen=True)
class Localise:
    """Measure how well credit marks the wrong step: area under the ROC curve, for every credit estimator.

    For example:
      creditscope papers localise                            # arithmetic with planted errors, the packaged model
      creditscope papers localise --problems 50 --samples 4  # quicker
      creditscope papers localise --credit monte_carlo,samples=32 prefix_tree
      creditscope papers localise --processbench gsm8k.json SmolLM2-135M-Instruct.gguf
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""
    processbench: Path | None = None
    """A file of ProcessBench, whose solutions the model reads; without it, arithmetic with planted errors."""
    problems: int | None = None
    """Problems to plant an error in, by default 200; of a file, solutions drawn from it, by default all."""
    group: int = 8
    """R, rollouts per problem, the planted one among them."""
    samples: int = 8
    """K, continuations at each cut for Monte Carlo values."""
    credit: tuple[str, ...] = ()
    """Estimators to judge, with options after commas, or your own module:function; by default all that can run."""
    critic: str = "head"
    """The critic of gae: head (a value head on the policy) or model (a copy of the policy with its own)."""
    seed: int = 0
    """Fixes errors, samples, the critic and the bootstrap."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        require_module("localising errors", "transformers")
        with Progress.beside("localise", self.output) as bar:
            outcome = self._measure(bar)
        if (console := self.output.console_or_json(asdict(outcome))) is None:
            return 0
        for name, rows in outcome.tables.items():
            console.print_columns(
                ("score", "AUC of |A|", "AUC of −A", "top step", "chance"),
                [[row.name + mark(row.name), str(row.size), str(row.blame), str(row.hit), f"{row.chance:.3f}"]
                 for row in rows], title=f"{TITLES[name]} (n = {rows[0].n if rows else 0})")
        console.print("AUC over tokens: ½ is chance, 1 is perfect. Credit on one token of n in the wrong step gets at "
                      "most ½ + 1/2n: then read the top step.")
        console.print("top step: the step with the largest mean |A| is the wrong one; ties share. In brackets: 95 %, "
                      "bootstrap over rollouts.  * no credit, for comparison  † sees the labels")
        for spec, reason in outcome.skipped.items():
            console.print(f"left out: {spec}: {reason}", markup=False)
        console.print("  ".join(f"{name} {value:.4g}" for name, value in outcome.facts.items()), markup=False)
        console.print(f"{sum(outcome.seconds.values()):.0f} s: " + ", ".join(
            f"{name} {value:.1f}" for name, value in outcome.seconds.items() if value >= 0.1), markup=False)
        console.next("creditscope list credits NAME")
        return 0

    def _measure(self, bar: Progress) -> StudyResult:
        refuse_missing(self.model)
        # Heavy imports wait until there is something to measure, so that --help answers at once.
        from creditscope.policy.loading import load_policy
        from creditscope.studies.processbench import localise_processbench, read_processbench

        if self.processbench is not None:
            solutions = read_processbench(self.processbench)  # before the model is loaded: that takes longer
            return localise_processbench(load_policy(self.model, device=self.device), solutions, seed=self.seed,
                                         problems=self.problems, credit=self.credit, tick=bar.tick)
        from creditscope.studies.planted_errors import check_sizes, localise_planted
        from creditscope.tasks.arithmetic import Arithmetic

        problems = PROBLEMS if self.problems is None else self.problems
        task = Arithmetic()
        check_sizes(problems, self.group, self.samples)
        if problems > task.test_size:
            raise CreditscopeError(f"--problems {problems}: the test split has {task.test_size}; give that or fewer")
        return localise_planted(load_policy(self.model, device=self.device), task, problems=problems, group=self.group,
                                samples=self.samples, seed=self.seed, credit=self.credit, critic=self.critic,
                                tick=bar.tick)


def mark(spec: str) -> str:
    """† for an estimator that is told which steps are wrong, * for a score that is no credit.

    >>> mark("step_reward"), mark("surprise"), mark("prefix_tree")
    (' †', ' *', '')
    """
    name = spec.split(",")[0]
    if name in ESTIMATORS:
        return " †" if "steps" in ESTIMATORS[name].needs else ""
    return "" if ":" in name else " *"
