"""tests/diagnosis/logs/prime_rl: episodes are verifiers 0.4.0's, their metrics and the file monitor prime-rl 0.8.0's
own; so are the episodes in tests/offline/dumps/prime_rl.

    PYTHONPATH=tests/diagnosis/make_trainers:VERIFIERS:PRIME_RL/src:PRIME_RL/packages/prime-rl-configs/src \\
        python tests/diagnosis/make_trainers/of_prime_rl.py
"""

import asyncio
import json
import shutil

from draw import LOGS, batches, home
from hollow import hollow

hollow("wandb", "opentelemetry", "connectrpc", "pyqwest", "prime_cli", "prime_traces", "wandb_workspaces", "wandb_gql")

import verifiers.v1 as vf  # noqa: E402
from prime_rl.configs.monitors import FileMonitorConfig  # noqa: E402
from prime_rl.monitors.file import FileMonitor  # noqa: E402
from prime_rl.orchestrator.metrics import TrainEpisodes  # noqa: E402
from verifiers.v1.configs.agent import WireAgentConfig  # noqa: E402
from verifiers.v1.graph import MessageNode  # noqa: E402
from verifiers.v1.trace import AgentInfo, ModelCall, Reward, TraceTask  # noqa: E402
from verifiers.v1.types import AssistantMessage, Usage, UserMessage  # noqa: E402


def episode(step: int, row: int, size: int, reward: float, text: str) -> vf.Episode:
    prompt = f"What is {row // 4}?"
    task = TraceTask(type="Task", data=vf.TaskData(idx=row // 4, prompt=prompt))
    ids = [ord(letter) for letter in text][:size]
    nodes = [MessageNode(message=UserMessage(content=prompt), token_ids=[ord(c) for c in prompt],
                         mask=[False] * len(prompt), timestamp=0.0),
             MessageNode(parent=0, message=AssistantMessage(content=text), sampled=True, token_ids=ids,
                         mask=[True] * len(ids), logprobs=[-0.5] * len(ids), timestamp=0.0)]
    call = ModelCall(node=1, finish_reason="stop", usage=Usage(prompt_tokens=len(prompt), completion_tokens=size))
    trace = vf.Trace(id=f"{step}-{row}", task=task, agent=AgentInfo(config=WireAgentConfig()), nodes=nodes,
                     calls=[call], rewards={"correct": Reward(score=reward)}, is_completed=True, ok=True)
    return vf.Episode(id=f"e{step}-{row}", env=vf.EnvInfo(id="arithmetic", name="arithmetic"), task=task,
                      group=vf.GroupInfo(id=f"{step}-{row // 4}"), ok=True, traces=[trace],
                      run=vf.TrainRunInfo(id="run", work=vf.TrainWorkInfo(step=step)))


async def main() -> None:
    folder, dumps = home("prime_rl"), LOGS.parents[1] / "offline" / "dumps" / "prime_rl"
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(dumps, ignore_errors=True)
    metrics, traces = FileMonitor(FileMonitorConfig()), FileMonitor(FileMonitorConfig())
    await metrics.init(folder)
    await traces.init(dumps)
    for batch in batches():
        texts = batch.text or [""] * 8
        made = [episode(batch.step, row, int(batch.length[row]), float(batch.reward[row]),
                        texts[row] if row < 8 else "x" * 40) for row in range(64)]
        found = TrainEpisodes(made, {trace.id for each in made for trace in each.traces})
        rows = {**found.metrics.to_wandb(prefix="train/agg", subset="all"),
                **found.effective.metrics.to_wandb(prefix="train/agg", subset="effective")}
        await metrics.log({name: value for name, value in rows.items() if "timing" not in name}, step=batch.step)
        await metrics.log({"optim/lr": 1e-6, "step": batch.step, "optim/grad_norm": batch.grad_norm}, step=batch.step)
        await metrics.log({"loss/mean": -0.001 * batch.step, "entropy/all/mean": batch.entropy.mean().item(),
                           "mismatch_kl/all/mean": 0.0003, "is_masked/mean": 0.001, "step": batch.step},
                          step=batch.step)
        if batch.step % 6 == 0:
            await metrics.log({"eval/arithmetic/effective/agent/avg@4": 0.4 + 0.01 * batch.step}, step=batch.step)
        if batch.text:
            await traces.log(made[:8], batch.step, "train", "all")
    (dumps / "metrics.jsonl").unlink()
    configs = folder / "configs"
    configs.mkdir(exist_ok=True)
    (configs / "orchestrator.json").write_text(json.dumps(
        {"group_size": 4, "batch_size": 64, "max_steps": 12, "train": {"sampling": {"temperature": 1.0}}}) + "\n")
    (configs / "trainer.json").write_text(json.dumps({"optim": {"type": "adamw", "lr": 1e-6}}) + "\n")


asyncio.run(main())
