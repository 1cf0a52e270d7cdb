"""Does the weighting make answers shorter? Short against long correct answers, rewarded alike, method by method.

    python benchmarks/length.py            three worlds, two or four methods, five seeds; writes benchmarks/length.md

The packaged model is warmed up on its own answers in two forms with equal chance: SHORT ends with the result, LONG goes
on with lines that the verifier does not read. A form is chosen at one token, a line break or the end, when right and
wrong are already decided: both forms are equally right, and earn the same. Worlds:

    visible    one answer in four has lines `0 + 0 = 0`, which are always wrong, as the policy can tell
    hidden     the model's own errors of calculation
    random     as hidden, and rewards are 1 or 0 with probability 1/2

The log-odds of LONG are read at that token, exactly, behind answers of the model's own that are right or wrong,
and behind nonsense. With 1/L_i (arXiv:2601.05002, Prop. 1) the first should fall, and those behind errors rise.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from creditscope.lab.rollout import roll_out
from creditscope.methods.table import METHODS
from creditscope.objective.surrogate import surrogate
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import token_logp
from creditscope.runs.intervals import mean_interval
from creditscope.tasks import Problem
from creditscope.tasks.arithmetic import Arithmetic

HEAD = "# Does the weighting make answers shorter?\n\n"
NOTE = ("*Δ log-odds*: change of log π(long)/π(short) over the run, behind right answers, wrong ones and nonsense. "
        "*Accuracy*, *length* and *P(long | right)*: one answer to each of 256 test problems after the run. Mean and "
        "95 % Student interval over the seeds; a change is bold where its interval leaves 0 out. The last lines are "
        "paired by seed. What it means: [docs/prefix_bias.md](../docs/prefix_bias.md).\n")
PAGE = Path(__file__).with_suffix(".md")
TASK = Arithmetic(min_steps=2, max_steps=2, distractor=0.0)
MAX_TOKENS = 48
TAIL = "\n1 + 1 = 2" * 3
NONSENSE = "0 + 0 = 0\n0 + 0 = 0\n#### 0"
WORLDS = {"visible": ("grpo", "grpo_even", "dr_grpo", "dapo"), "hidden": ("grpo", "grpo_even"),
          "random": ("grpo", "grpo_even")}
TITLES = {"right": "Δ log-odds, right", "wrong": "Δ log-odds, wrong", "nonsense": "Δ log-odds, nonsense",
          "contrast": "nonsense − right", "accuracy": "accuracy", "length": "length of right answers",
          "long": "P(long \\| right)"}
LEVELS = ("accuracy", "length", "long")  # sampled at the end; the others are changes since the start


@dataclass(frozen=True)
class Answer:
    """A text, up to its result, and whether the result is right."""

    problem: Problem
    text: str
    right: bool


def answers(policy: Policy, count: int, seed: int) -> list[Answer]:
    """The packaged model's answers to `count` train problems."""
    found = []
    problems = TASK.problems("train", seed)
    for turn in range(count // 64):
        batch = roll_out(policy, TASK, list(islice(problems, 64)), 1, max_tokens=MAX_TOKENS, temperature=1.0, top_p=1.0,
                         generator=torch.Generator().manual_seed(seed + turn))
        for problem, text, reward in zip(batch.problems, batch.rollouts.text, batch.rollouts.reward, strict=True):
            found.append(Answer(problem, text.rstrip("\n"), bool(reward)))
    return found


def completion_ids(policy: Policy, text: str) -> list[int]:
    return [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id]


def log_probs(policy: Policy, problems: Sequence[Problem], texts: Sequence[str], grad: bool) -> torch.Tensor:
    """(B, T) log π of each text as the answer to its problem."""
    ids = [completion_ids(policy, text) for text in texts]
    width = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.arange(width) < torch.tensor([len(row) for row in ids])[:, None]
    return token_logp(policy, [policy.encode(p.prompt) for p in problems], tokens, mask, 1.0, grad)


def warm_up(policy: Policy, own: Sequence[Answer], world: str, steps: int) -> None:
    """Supervised steps on the model's own answers, with a random form each time."""
    optimizer = torch.optim.AdamW(policy.trainable().values(), 3e-4)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * (1 - step / steps)
        some = [own[i] for i in torch.randint(len(own), (48,), generator=draw).tolist()]
        texts = []
        for answer in some:
            form, other = torch.rand(2, generator=draw).tolist()
            texts.append((NONSENSE if world == "visible" and other < 0.25 else answer.text) + TAIL * (form < 0.5))
        logp = log_probs(policy, [answer.problem for answer in some], texts, grad=True)
        optimizer.zero_grad()
        (-logp.sum() / (logp != 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.trainable().values(), 1.0)
        optimizer.step()


def log_odds(policy: Policy, held: Sequence[Answer]) -> float:
    """Mean of log π(long)/π(short) at the token behind the result: a line break against the end."""
    at = [len(completion_ids(policy, answer.text)) - 1 for answer in held]
    problems = [answer.problem for answer in held]
    long, short = (log_probs(policy, problems, [answer.text + tail for answer in held], grad=False)[range(len(at)), at]
                   for tail in (TAIL, ""))
    return float((long - short).mean())


def sampled(policy: Policy, problems: Sequence[Problem]) -> dict[str, float]:
    """Accuracy, and of the right answers the mean length and the share that is long."""
    batch = roll_out(policy, TASK, problems, 1, max_tokens=MAX_TOKENS, temperature=1.0, top_p=1.0,
                     generator=torch.Generator().manual_seed(1))
    right, long = batch.rollouts.reward > 0, torch.tensor([TAIL in text for text in batch.rollouts.text])
    return {"accuracy": float(right.double().mean()),
            "length": float(batch.rollouts.lengths[right].double().mean()),
            "long": float(long[right].double().mean())}


def train(start: Policy, world: str, name: str, seed: int, steps: int, held: dict[str, list[Answer]],
          test: Sequence[Problem]) -> dict[str, float]:
    """One run: the change of the log-odds in each context, and statistics of samples at the end."""
    policy = replace(start, model=copy.deepcopy(start.model))
    method = METHODS[name]
    method = method.replace(max_tokens=MAX_TOKENS) if method.aggregate == "constant" else method
    parameters = list(policy.trainable().values())
    optimizer, problems = torch.optim.AdamW(parameters, 3e-5, weight_decay=0.0), TASK.problems("train", 100 + seed)
    before = {kind: log_odds(policy, some) for kind, some in held.items()}
    for step in range(steps):
        draw = torch.Generator().manual_seed(1000 * seed + step)
        batch = roll_out(policy, TASK, list(islice(problems, 4)), 8, max_tokens=MAX_TOKENS, temperature=1.0, top_p=1.0,
                         generator=draw)
        rollouts = batch.rollouts
        if world == "random":
            rollouts = replace(rollouts, reward=torch.randint(2, (len(rollouts),), generator=draw).float())
        logp = token_logp(policy, batch.rollouts.prompt_ids, rollouts.tokens, rollouts.mask, 1.0)
        optimizer.zero_grad()
        (-surrogate(method, logp, rollouts)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    drift = {kind: log_odds(policy, some) - before[kind] for kind, some in held.items()}
    if "nonsense" in drift:
        drift["contrast"] = drift["nonsense"] - drift["right"]
    return drift | sampled(policy, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=80)
    given = parser.parse_args()
    torch.set_num_threads(1)

    packaged = load_policy("tiny", device="cpu")
    own, others = answers(packaged, 2560, seed=7), answers(packaged, 384, seed=999)
    right, wrong = ([a for a in others if a.right == side][:64] for side in (True, False))
    held = {"right": right, "wrong": wrong}
    test = list(islice(TASK.problems("test"), 256))
    lines = [HEAD, f"`python benchmarks/length.py --steps {given.steps} --seeds {given.seeds} --warm-up {given.warm_up}"
             f"`: packaged model, {given.steps} steps of 4 prompts × 8 rollouts, AdamW 3e-5, one pass a batch, 2-core "
             f"CPU machine, 1 thread, torch {torch.__version__}.\n\n", NOTE]
    starts: dict[str, Policy] = {}
    for world, names in WORLDS.items():
        kind = "visible" if world == "visible" else "hidden"
        if kind not in starts:
            starts[kind] = replace(packaged, model=copy.deepcopy(packaged.model))
            warm_up(starts[kind], own, kind, given.warm_up)
        contexts = dict(held)
        if kind == "visible":
            contexts["nonsense"] = [Answer(a.problem, NONSENSE, False) for a in right]
        lines.append(section(world, names, starts[kind], contexts, test, given.seeds, given.steps))
        print(lines[-1], flush=True)
    PAGE.write_text("".join(lines))


def section(world: str, names: Sequence[str], start: Policy, contexts: dict[str, list[Answer]],
            test: Sequence[Problem], seeds: int, steps: int) -> str:
    """A world's table: at the start, each method with its interval over the seeds, and paired with the first."""
    before = {kind: log_odds(start, some) for kind, some in contexts.items()} | sampled(start, test)
    found = {name: [train(start, world, name, seed, steps, contexts, test) for seed in range(seeds)]
             for name in names}
    columns = list(found[names[0]][0])
    table = [["", *(TITLES[key] for key in columns)], ["---"] * (len(columns) + 1),
             ["before, as it is", *(f"{before[key]:.2f}" if key in before else "" for key in columns)]]
    table += [[name, *(span([run[key] for run in runs], key not in LEVELS) for key in columns)]
              for name, runs in found.items()]
    table += [[f"{name} − {names[0]}", *(span([run[key] - first[key] for run, first in
                                               zip(found[name], found[names[0]], strict=True)], True)
                                         for key in columns)] for name in names[1:]]
    return f"\n## {world}\n\n" + "".join("| " + " | ".join(row) + " |\n" for row in table)


def span(values: Sequence[float], change: bool) -> str:
    """Mean and 95 % interval; a change is bold where the interval leaves 0 out."""
    found = mean_interval(values)
    if found.low is None:
        return f"{found.mean:.2f}"
    text = f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
    return f"**{text}**" if change and found.excludes_zero else text


if __name__ == "__main__":
    main()
