"""The runs behind the claims on a real model, side by side on one GPU, and their summaries in one small file.

    python benchmarks/real_model.py qwen-0.5b.gguf gsm8k:data --out runs/qwen --jobs 5 --limit-seconds 540
    python benchmarks/real_model.py --out runs/qwen --pack qwen.tar.xz                           # what there is so far
    tar xJf qwen.tar.xz results && python docs/generate.py                                       # its column of claims

In this order, --jobs at a time; a .gguf is converted to a folder once, before them:

    learn    GRPO at R = 8, outcome credit, three seeds: the learning curve, P1.4, P2.5, and what `credit` compares with
    sampled  p1's short runs with credit from continuations: a label per step, and per uncertain token
    p1       `creditscope papers reproduce p1`: R = 2, 4, 8 seed by seed, then 16 and 32 with --recompute
    p2       `creditscope papers reproduce p2`: brakes at four updates per batch
    credit   the first steps of learn, under credits that gained on the packaged model, at equal rollouts
    float32  p1's runs at R = 8 once more, in float32

At --limit-seconds, Ctrl-C or SIGTERM the runs end after their step with a checkpoint, and the same command continues.
After SIGKILL finished runs are kept, and the others start from their last checkpoint. Of a finished run checkpoint and
weights are deleted (a 0.5 B model in float32: 8 GB), as no claim reads them. --pack may run beside the runs. It writes
results/KIND-MODEL/*.evidence.json (finished runs), partial/ (the others), runs/ (run.json, steps.jsonl, logs), and
verdicts.json.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from creditscope.claims.evidence import Evidence, read_evidence, to_json
from creditscope.claims.table import check
from creditscope.cli.interrupt import Interrupt
from creditscope.cli.reproduce import Choices, Reproduce
from creditscope.cli.sweep import HERE, check_on, executor, is_done, jobs_of
from creditscope.errors import CreditscopeError
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.studies.plans import CLOSE, Size, p1, p2

SAMPLED = ("monte_carlo,samples=2", "spo_chain,samples=2,every=1,probability=0.5")
"""Credit from two continuations at the end of each step, and after each token with π < ½."""
WINNERS = ("optimal_sequence", "optimal_token", "step_reward")
"""Credits above outcome on the packaged model (docs/results.md). optimal_scalar was, too: it takes one more pass."""
SETS = ("learn", "sampled", "p1", "p2", "credit", "float32")
LARGEST = 10_000_000


def main() -> None:
    args = parsed()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.pack:
        pack(args.out, args.pack)
    elif args.model is None or args.task is None:
        raise SystemExit("name the model and the task, or give --pack FILE")
    else:
        make(args)


def make(args: argparse.Namespace) -> None:
    """Train what is not finished."""
    plan = planned(args, converted(args.model, args.out))
    todo = {name: config for name, config in plan.items() if not is_done(args.out / name, config)}
    spent = sum(config.rollouts or config.steps * config.prompts * config.group for config in todo.values())
    print(f"{len(todo)} of {len(plan)} runs to make, {spent:,} rollouts without evaluations, {args.jobs} at a time")
    check_on(args.on)
    start, told = time.monotonic(), set[str]()

    def watch(running: Sequence[str], ended: Mapping[str, str | None]) -> None:
        for name in ended.keys() - told:
            told.add(name)
            print(f"{time.monotonic() - start:.0f} s  {name}: {ended[name] or 'finished'} ({len(told)} of {len(todo)})")
            if ended[name] is None:
                lighten(args.out / name)

    for name in plan.keys() - todo.keys():
        lighten(args.out / name)
    with executor(args.on, print) as run, Interrupt() as stop:
        ended = run(jobs_of(args.out, todo, args.on), args.jobs,
                    lambda: stop() or time.monotonic() - start > args.limit_seconds, watch)
    left = [name for name in todo if name not in ended or ended[name] is not None]
    print(f"{len(left)} runs are left; the same command continues" if left else "all runs are finished")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="tiny, a .gguf file or a folder")
    parser.add_argument("task", nargs="?", help="as of creditscope lab train, such as gsm8k:data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=Path, help="write the summaries of --out into this .tar.xz, and stop")
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--jobs", type=int, default=5, help="runs at once; each holds the model")
    parser.add_argument("--on", default=HERE, help="here, or a Ray cluster as of creditscope lab compare --on")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--steps", type=int, default=12, help="of p1; a multiple of 4 (see --evaluations)")
    parser.add_argument("--readings", type=int, default=4, help="of p1's runs")
    parser.add_argument("--brake-steps", type=int, default=8, help="of p2")
    parser.add_argument("--brakes", nargs="+", default=["none", "recall", "shorten"], help="of p2")
    parser.add_argument("--learn-steps", type=int, default=80, help="of learn; a multiple of 4")
    parser.add_argument("--learn-prompts", type=int, default=16)
    parser.add_argument("--credit-steps", type=int, default=40, help="of credit; learn is evaluated there")
    parser.add_argument("--dtype", default="bfloat16", help="of all runs but those of the set float32")
    parser.add_argument("--prompts", type=int, default=8, help="of p1 and p2")
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--answer", default="strict")
    parser.add_argument("--eval-problems", type=int, default=400, help="of p1; the other sets take twice as many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=JSON",
                        help="further settings of every run, such as recompute=true")
    return parser.parse_args()


def planned(args: argparse.Namespace, model: str) -> dict[str, Config]:
    """Folder -> settings of the runs, in the order in which they start."""
    size = Size(model=model, task=args.task, answer=args.answer, steps=args.steps, prompts=args.prompts, lr=args.lr,
                temperature=args.temperature, max_tokens=args.max_tokens, accumulate=args.accumulate, seeds=args.seeds,
                groups=tuple(args.groups), readings=args.readings, evaluations=4, eval_problems=args.eval_problems,
                sampled=SAMPLED, dtype=args.dtype)
    brakes = replace(size, groups=Size.groups, readings=None, evaluations=Size.evaluations, sampled=(), clip_norm=None,
                     eval_problems=2 * args.eval_problems, steps=args.brake_steps)
    for paper, own in (("p1", size), ("p2", brakes)):
        print(f"{paper} (here with --recompute above R = {CLOSE}, and p2 with --brakes alone): "
              f"{Reproduce(paper, Choices(**asdict(own))).command()} --out {args.out / paper}")  # type: ignore[arg-type]
    rollouts = args.learn_steps * args.learn_prompts * CLOSE
    learn = Config(**brakes.common() | {"prompts": args.learn_prompts},
                   method="grpo", group=CLOSE, steps=args.learn_steps, rollouts=rollouts, eval_rollouts=rollouts // 4,
                   scope="off", probe="off", keep_every=0, recompute=True,
                   checkpoint_every=args.learn_steps)
    short = replace(learn, steps=args.credit_steps, rollouts=args.credit_steps * args.learn_prompts * CLOSE,
                    checkpoint_every=args.credit_steps)
    seeds = range(args.seeds)
    sweep = {name: replace(config, recompute=config.group > CLOSE) for name, config in p1(size)}
    sizes = sorted((name for name in sweep if name.startswith("r")), key=lambda name: sweep[name].recompute)
    sets: dict[str, dict[str, Config]] = {
        "learn": {f"learn/outcome/seed-{seed}": replace(learn, seed=seed) for seed in seeds},
        "p1": {f"p1/{name}": sweep[name] for name in sizes},
        "p2": {f"p2/{name}": config for name, config in p2(brakes) if config.brake in args.brakes},
        "sampled": {f"p1/{name}": config for name, config in sweep.items() if name.startswith("sampled")},
        "credit": {f"learn/{credit}/seed-{seed}": replace(short, credit=credit, seed=seed)
                   for seed in seeds for credit in WINNERS},
        "float32": {f"float32/seed-{seed}": replace(sweep[f"r{CLOSE}/seed-{seed}"], dtype="float32", scope="off",
                                                    also=()) for seed in seeds}}
    more = {name: json.loads(value) for name, _, value in (word.partition("=") for word in args.set)}
    return {name: replace(config, device=args.device, **more)
            for kind in SETS if kind in args.only for name, config in sets[kind].items()}


def converted(model: str, out: Path) -> str:
    """The folder of a .gguf file's model, so that not every process reads the file back to float32."""
    if Path(model).suffix != ".gguf":
        return model
    folder = out / Path(model).stem
    if not folder.exists():
        from creditscope.policy.loading import load_policy

        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        load_policy(model, device="cpu").save(part)
        part.rename(folder)
    return str(folder)


def lighten(path: Path) -> None:
    """Delete checkpoint and weights of a finished run."""
    for name in ("checkpoints", "model"):
        shutil.rmtree(path / name, ignore_errors=True)


def pack(out: Path, to: Path) -> None:
    """Every run as evidence, its steps and its log, and the verdicts on the finished ones, in one archive."""
    whole: list[Evidence] = []
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w:xz", preset=9) as archive:
        for place in sorted(place.parent for place in out.glob("*/**/run.json")):
            kind, *names = place.relative_to(out).parts
            for path in (place / "run.json", place / "steps.jsonl", place.with_suffix(".log")):
                if path.is_file():
                    add(archive, f"runs/{path.relative_to(out)}", path.read_bytes())
            try:
                run = replace(read_evidence(Record.open(place)), name="-".join(names))
            except (CreditscopeError, OSError) as error:  # it is being written, or the process was killed
                print(f"left out: {error}")
                continue
            if kind == "learn":  # its ranks by step stay; those of each group are P1's question, under P1's method
                run = replace(run, groups={}, readings={})
            whole += [run] * run.finished
            folder = f"{'results' if run.finished else 'partial'}/{kind}-{out.name}"
            add(archive, f"{folder}/{run.name}.evidence.json", to_json(run).encode())
        verdicts = [asdict(verdict) for verdict in check(whole)] if whole else []
        add(archive, "verdicts.json", json.dumps(verdicts, indent=1, ensure_ascii=False).encode())
    size = to.stat().st_size
    print(f"{to}: {len(whole)} finished runs, {size:,} bytes" + " (more than 10 MB)" * (size > LARGEST))


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main()
