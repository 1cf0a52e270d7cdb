"""Make the clinic's runs: each case of cases.py, by TRL's GRPOTrainer and by the lab, on the packaged model.

    python benchmarks/clinic/run.py --out DIR --jobs 16                  all cases, both engines, seeds 0 1 2
    python benchmarks/clinic/run.py --out DIR --only lr-tiny --seeds 0   one case, one seed
    python benchmarks/clinic/run.py --out DIR --remedies only            the remedies instead of the faults; or: too
    CLINIC_MODEL=M CLINIC_GSM8K=D python benchmarks/clinic/run.py --out DIR --engine real --device cuda --jobs 5
    python benchmarks/clinic/run.py --out DIR --quick                    without the callback and evals: does it harm?
    python benchmarks/clinic/run.py --out DIR --pack runs.tar.xz         pack what was made, and stop

A run is a process with one thread; --device cuda puts the policies of all of them on the GPU. A folder with
outcome.json is done and is left out. A run that fails is named with its last line, and the others go on. Held-out
problems are always judged by the right verifier, whatever the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import (  # noqa: E402
    BY_NAME,
    CASES,
    LAB_BASE,
    LIMIT,
    PLAIN,
    REAL,
    REAL_BASE,
    SEEDS,
    SHORT,
    TRL_BASE,
    Case,
    Change,
)
from rewards import REWARDS, TASK, Answer  # noqa: E402

from creditscope.tasks.arithmetic import Arithmetic  # noqa: E402

DEVICE = os.environ.get("CLINIC_DEVICE", "cpu")
PROBLEMS = 600
HELD_OUT = 256
EVAL_PROMPTS, EVAL_EVERY = 32, 10
EASIEST = 64
ONE_STEP = Arithmetic(min_steps=1, max_steps=1, distractor=0.0, largest=20)
HARD = Arithmetic(min_steps=6, max_steps=6, largest=9999)
"""The packaged model has never seen numbers above 99 in training; it solves 0.5 % of these problems up to 999."""


@dataclass(frozen=True)
class Job:
    """One run."""

    case: Case
    engine: str
    seed: int
    remedy: bool = False

    @property
    def folder(self) -> str:
        return f"{self.case.name}{'+remedy' if self.remedy else ''}/{self.engine}-{self.seed}"

    @property
    def change(self) -> Change:
        if not self.remedy:
            return self.case.change
        assert self.case.remedy is not None
        return self.case.remedy


def jobs(only: list[str], engine: str | None, seeds: list[int], remedies: str) -> list[Job]:
    """The wanted runs, by seed. A remedy that restores the healthy setting is not run: the run of `plain` is it."""
    if engine == "real":
        return [Job(BY_NAME[name], engine, seed) for seed in seeds for name in REAL if not only or name in only]
    kinds = {"no": (False,), "only": (True,), "too": (False, True)}[remedies]
    return [Job(case, name, seed, cure) for seed in seeds for cure in kinds for case in CASES for name in case.engines
            if (not only or case.name in only) and engine in (None, name)
            and (not cure or case.remedy not in (None, PLAIN))]


# -- the data ---------------------------------------------------------------------------------------------------------

def problems_of(data: str, seed: int) -> list[Any]:
    """Training problems of a data set of the table."""
    if data == "easy":
        listed = json.loads((HERE / "prompts.json").read_text())["easy"]
        return [ONE_STEP.problem("train", index) for index in listed]
    found = list(itertools.islice((HARD if data == "hard" else TASK).problems("train", seed), PROBLEMS))
    return found[:4] if data == "four" else found


def held_out(count: int) -> list[Any]:
    return list(itertools.islice(TASK.problems("test"), count))


def sort_prompts() -> None:
    """Write prompts.json: the EASIEST one-step problems by the packaged model's own share of right answers in 32."""
    import torch

    from creditscope.lab.rollout import roll_out
    from creditscope.policy.loading import load_policy

    torch.set_num_threads(1)
    policy, generator = load_policy("tiny", device="cpu"), torch.Generator().manual_seed(0)

    def share(numbers: list[int], group: int) -> list[float]:
        found: list[float] = []
        for start in range(0, len(numbers), 32):
            some = [ONE_STEP.problem("train", i) for i in numbers[start:start + 32]]
            drawn = roll_out(policy, TASK, some, group, max_tokens=24, temperature=1.0, top_p=1.0, generator=generator)
            found += drawn.rollouts.reward.view(len(some), group).mean(1).tolist()
        return found

    numbers = list(range(480))
    passed = [i for i, p in zip(numbers, share(numbers, 8), strict=True) if p == 1]
    ranked = sorted(zip(share(passed, 24), passed, strict=True), key=lambda pair: -pair[0])[:EASIEST]
    found = {"easy": [i for _, i in ranked], "share": [round(p, 3) for p, _ in ranked]}
    (HERE / "prompts.json").write_text(json.dumps(found) + "\n")
    print(f"{len(passed)} of {len(numbers)} passed 8 answers; shares of 24: "
          f" {ranked[-1][0]:.2f} to {ranked[0][0]:.2f}")


# -- one run ----------------------------------------------------------------------------------------------------------

def make(job: Job, out: Path) -> None:
    """Make one run in this process; outcome.json is written last."""
    import torch

    torch.set_num_threads(1)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    start = time.perf_counter()
    found = {"trl": by_trl, "lab": by_lab, "real": by_real}[job.engine](job, out)
    outcome = {"case": job.case.name, "kind": job.case.kind, "engine": job.engine, "seed": job.seed,
               "remedy": job.remedy, "seconds": round(time.perf_counter() - start, 1)} | found
    (out / "outcome.json").write_text(json.dumps(outcome) + "\n")


def prepare(policy: Any, change: Change) -> None:
    """Freeze what the case freezes."""
    if change.model == "frozen":
        for name, parameter in policy.model.named_parameters():
            parameter.requires_grad_(name == "model.norm.weight")


def accuracy(policy: Any) -> float:
    """Share of HELD_OUT test problems that one sampled answer each gets right."""
    import torch

    from creditscope.lab.rollout import roll_out

    mode = policy.model.training
    policy.model.eval()
    with torch.no_grad():
        drawn = roll_out(policy, TASK, held_out(HELD_OUT), 1, max_tokens=LIMIT, temperature=1.0, top_p=1.0,
                         generator=torch.Generator(policy.device).manual_seed(0))
    policy.model.train(mode)
    return float(drawn.rollouts.reward.mean())


def by_trl(job: Job, out: Path) -> dict[str, Any]:
    """A run of TRL's GRPOTrainer, with the callback's record."""
    import transformers
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    from creditscope.plugins.trl import ScopeCallback
    from creditscope.policy.loading import load_policy

    transformers.logging.set_verbosity_error()
    change = job.change
    policy = load_policy("tiny", device=DEVICE, dtype="bfloat16" if change.model == "bf16" else "float32")
    before = accuracy(policy)
    prepare(policy, change)
    train, test = problems_of(change.data, job.seed), held_out(EVAL_PROMPTS)
    rng, reward = random.Random(job.seed), REWARDS[change.reward]
    settings = {**TRL_BASE, **change.trl}

    def verifier(completion_ids: list[list[int]], number: list[int], split: list[str],
                 **_: Any) -> list[float | None]:
        limit = settings["max_completion_length"]
        asked = [(train if s == "train" else test)[n] for n, s in zip(number, split, strict=True)]
        texts = [policy.decode(ids) for ids in completion_ids]
        batch = [Answer(problem, text, len(ids), limit, n, TASK.verify(problem, text).reward)
                 for problem, text, ids, n in zip(asked, texts, completion_ids, number, strict=True)]
        return reward(batch, rng) if split[0] == "train" else REWARDS["right"](batch, rng)

    def rows(problems: list[Any], split: str) -> Any:
        # A fingerprint, since dill cannot hash a pyarrow table in every version of the two.
        listed = [{"prompt": p.prompt, "number": i, "split": split} for i, p in enumerate(problems)]
        return Dataset(InMemoryTable.from_pylist(listed), fingerprint=f"{job.case.name}-{job.seed}-{split}")

    updates = settings.get("num_iterations", 1)
    quick = "CLINIC_QUICK" in os.environ
    evals = job.case.evals and not quick
    if evals:
        settings |= {"eval_strategy": "steps", "eval_steps": EVAL_EVERY * updates, "num_generations_eval": 2,
                     "per_device_eval_batch_size": 2 * EVAL_PROMPTS}
    told: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, heard(told), contextlib.redirect_stdout(sys.stderr):
        args = GRPOConfig(output_dir=scratch, use_cpu=DEVICE == "cpu", bf16=False, gradient_checkpointing=False,
                          report_to="none", disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
                          seed=job.seed, **settings)
        trainer = GRPOTrainer(policy.model, verifier, args, rows(train, "train"),
                              rows(test, "test") if evals else None, processing_class=policy.tokenizer)
        if change.hook == "short-schedule":
            own = trainer.create_scheduler
            trainer.create_scheduler = lambda num_training_steps, optimizer=None: own(SHORT, optimizer)
        if not quick:
            trainer.add_callback(ScopeCallback(trainer, every=5, out=f"{scratch}/record"))
        trainer.train()
        history = trainer.state.log_history
        (out / "record").mkdir()
        for name in () if quick else ("run.json", "steps.jsonl"):
            shutil.copy(f"{scratch}/record/{name}", out / "record" / name)
    write_lines(out / "log-callback.jsonl", history)
    write_lines(out / "log.jsonl", [{k: v for k, v in row.items() if "creditscope/" not in k} for row in history])
    plain = {k: v for k, v in args.to_dict().items() if isinstance(v, str | int | float | bool | None)
             and k not in ("output_dir", "logging_dir", "run_name", "hub_token")}
    (out / "training_args.json").write_text(json.dumps(plain, indent=0) + "\n")
    (out / "warnings.json").write_text(json.dumps(sorted({text[:80] for text in told})) + "\n")
    return {"before": before, "after": accuracy(policy), **rewards_of([r["reward"] for r in history if "reward" in r])}


def by_lab(job: Job, out: Path) -> dict[str, Any]:
    """A run of the lab's loop on the packaged model."""
    from creditscope.lab import train as lab
    from creditscope.runs.config import Config

    change = job.change
    config = Config(**{**LAB_BASE, **change.lab}, seed=job.seed, device=DEVICE)
    listed = problems_of(change.data, job.seed)
    kept: list[Any] = []
    load = lab.load_policy

    def loading(*args: Any, **kwargs: Any) -> Any:
        policy = load(*args, **kwargs)
        kept.append((policy, accuracy(policy)))
        prepare(policy, change)
        return policy

    class Listed(type(TASK)):  # type: ignore[misc]
        def problems(self, split: str, seed: int = 0) -> Any:
            return iter(listed) if split == "train" else TASK.problems(split, seed)

    lab.load_policy, lab.find_task = loading, lambda *_, **__: Listed()
    error = train_in_lab(job, config, {problem.id: i for i, problem in enumerate(listed)}, out)
    policy, before = kept[0]
    return {"before": before, "after": after_of(policy, error), "error": error, **rewards_of(lab_rewards(out))}


def by_real(job: Job, out: Path) -> dict[str, Any]:
    """A run of the lab's loop on the model $CLINIC_MODEL and the GSM8K folder $CLINIC_GSM8K."""
    from creditscope.runs import schema
    from creditscope.runs.config import Config

    config = Config(**{**REAL_BASE, **REAL[job.case.name]}, model=os.environ["CLINIC_MODEL"],
                    task=f"gsm8k:{os.environ['CLINIC_GSM8K']}", seed=job.seed, device=DEVICE)
    error = train_in_lab(job, config, {}, out)
    seen = [step[schema.EVAL_ACCURACY] for step in steps_of(out) if schema.EVAL_ACCURACY in step]
    return {"before": seen[0], "after": None if error else seen[-1], "error": error, **rewards_of(lab_rewards(out))}


def train_in_lab(job: Job, config: Any, number: dict[str, int], out: Path) -> str:
    """Train with the case's reward and keep the record's lines; the error that stopped the run, or ""."""
    import torch

    from creditscope.cli.env import environment
    from creditscope.lab import train as lab

    rng, reward = random.Random(job.seed), REWARDS[job.change.reward]
    sample = lab.roll_out

    def sampling(policy: Any, task: Any, problems: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = sample(policy, task, problems, *args, **kwargs)
        rows = drawn.rollouts
        batch = [Answer(problem, text, int(mask.sum()), kwargs["max_tokens"], number.get(problem.id, -1), float(right))
                 for problem, text, mask, right in zip(drawn.problems, rows.text, rows.mask, rows.reward, strict=True)]
        given = reward(batch, rng)
        errors = drawn.errors + ["no reward" for r in given if r is None]
        made = torch.tensor([r or 0.0 for r in given], dtype=rows.reward.dtype, device=rows.reward.device)
        # Of these rewards two compare an answer with its reference, and can lose a right one to its form.
        lost = drawn.lost if job.change.reward == "right" else None
        if job.change.reward == "form":
            unpaid = [a.right > 0 and not r for a, r in zip(batch, given, strict=True)]
            lost = torch.tensor(unpaid, device=rows.reward.device) & drawn.finished
        return dataclasses.replace(drawn, rollouts=dataclasses.replace(rows, reward=made), errors=errors, lost=lost)

    lab.roll_out = sampling
    error = ""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        folder = Path(scratch) / "run"
        try:
            for _ in lab.train(config, folder, environment()):
                pass
        except Exception as stopped:  # a fault may stop the run; what it wrote before is the case
            error = f"{type(stopped).__name__}: {stopped}"[:300]
            if not (folder / "steps.jsonl").exists():
                raise
        (out / "record").mkdir()
        for name in ("run.json", "steps.jsonl"):
            shutil.copy(folder / name, out / "record" / name)
        for name in ARRAYS if config.keep_every else ():
            shutil.copytree(folder / name, out / "arrays" / name)
    return error


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "record" / "steps.jsonl").read_text().splitlines()]


def lab_rewards(out: Path) -> list[float | None]:
    return [step["reward/mean"] for step in steps_of(out) if "reward/mean" in step]


ARRAYS = ("groups", "scope")
"""Folders of a record that are kept beside it for the gallery; the judge does not read them."""


def after_of(policy: Any, error: str) -> float | None:
    """None where the weights are no longer numbers."""
    try:
        return accuracy(policy)
    except Exception:
        if not error:
            raise
        return None


def rewards_of(rewards: list[float | None]) -> dict[str, float]:
    """Mean of the first and of the last sixth; TRL logs None for a batch without any reward."""
    known = [reward for reward in rewards if reward is not None]
    part = max(1, len(known) // 6)
    return {"reward_first": round(sum(known[:part]) / part, 4),
            "reward_last": round(sum(known[-part:]) / part, 4)} if known else {}


@contextlib.contextmanager
def heard(told: list[str]) -> Any:
    """Warnings of TRL, transformers and Python, as a user would see them."""
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(f"{record.name}: {record.getMessage()}")

    handler = Keep(logging.WARNING)
    names = ("trl", "transformers", "accelerate")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in names:
            logging.getLogger(name).addHandler(handler)
        try:
            yield
        finally:
            for name in names:
                logging.getLogger(name).removeHandler(handler)
    told += [f"{type(w.message).__name__}: {w.message}" for w in caught]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Seven digits are more than any rule reads, and half of the bytes."""
    def short(value: Any) -> Any:
        return float(f"{value:.7g}") if isinstance(value, float) else value

    path.write_text("".join(json.dumps({k: short(v) for k, v in row.items()}) + "\n" for row in rows))


# -- all runs ---------------------------------------------------------------------------------------------------------

def start(job: Job, out: Path, limit: int) -> tuple[Job, str]:
    """Run a job in a process; ("" or the last line of its error)."""
    words = [sys.executable, __file__, "--out", str(out), "--worker", job.case.name, job.engine, str(job.seed),
             "remedy" if job.remedy else "fault"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                        "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if env["CLINIC_DEVICE"] == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return job, f"took more than {limit} s"
    if done.returncode == 0:
        return job, ""
    folder = out / job.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").write_text(done.stderr[-4000:])
    return job, (done.stderr.strip().splitlines() or ["no output"])[-1]


def told(outcome: dict[str, Any]) -> str:
    after = outcome["after"]
    return (f"accuracy {outcome['before']:.3f} → {'none' if after is None else f'{after:.3f}'}, reward "
            f"{outcome.get('reward_first', float('nan')):.3g} → {outcome.get('reward_last', float('nan')):.3g}, "
            f"{outcome['seconds']:.0f} s{'  ' + outcome['error'] if outcome.get('error') else ''}")


def pack(out: Path, to: Path) -> None:
    """The runs without what the judge does not read."""
    with tarfile.open(to, "w:xz", preset=9) as archive:
        for outcome in sorted(out.glob("*/*/outcome.json")):
            for path in sorted(outcome.parent.rglob("*")):
                if path.is_file() and path.name != "error.txt" and "arrays" not in path.parts:
                    archive.add(path, str(path.relative_to(out)), filter=_plain)
    print(f"{to}: {to.stat().st_size / 2**20:.2f} MiB")


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path, default=HERE / "runs")
    words.add_argument("--jobs", type=int, default=1)
    words.add_argument("--only", nargs="*", default=[])
    words.add_argument("--engine", choices=("trl", "lab", "real"))
    words.add_argument("--device", choices=("cpu", "cuda"), default=DEVICE)
    words.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    words.add_argument("--remedies", choices=("no", "only", "too"), default="no")
    words.add_argument("--limit", type=int, default=900, help="seconds per run")
    words.add_argument("--stop-after", type=float, default=1e9, help="seconds after which no run is started")
    words.add_argument("--pack", type=Path)
    words.add_argument("--sort-prompts", action="store_true", help="write prompts.json again")
    words.add_argument("--quick", action="store_true", help="TRL without callback and evaluations, to size a fault")
    words.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    at = words.parse_args()
    if at.sort_prompts:
        sort_prompts()
        return 0
    if at.pack:
        pack(at.out, at.pack)
        return 0
    if at.worker:
        name, engine, seed, kind = at.worker
        job = Job(BY_NAME[name], engine, int(seed), kind == "remedy")
        make(job, at.out / job.folder)
        return 0
    for name in at.only:
        if name not in BY_NAME:
            words.error(f"no case {name!r}; there are {', '.join(BY_NAME)}")
    os.environ["CLINIC_DEVICE"] = at.device  # for the workers
    if at.quick:
        os.environ["CLINIC_QUICK"] = "1"
    wanted = [job for job in jobs(at.only, at.engine, at.seeds, at.remedies)
              if not (at.out / job.folder / "outcome.json").exists()]
    begun, failed = time.perf_counter(), []

    def one(job: Job) -> tuple[Job, str]:
        if time.perf_counter() - begun > at.stop_after:
            return job, "not started: --stop-after"
        return start(job, at.out, at.limit)

    with ThreadPoolExecutor(at.jobs) as pool:
        for count, done in enumerate(as_completed([pool.submit(one, job) for job in wanted]), 1):
            job, error = done.result()
            if error:
                failed.append(job)
            line = f"FAILED {error}" if error else told(
                json.loads((at.out / job.folder / "outcome.json").read_text()))
            print(f"[{count}/{len(wanted)} {time.perf_counter() - begun:.0f} s] {job.folder}: {line}", flush=True)
    print(f"{len(wanted) - len(failed)} made, {len(failed)} failed, {time.perf_counter() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
