"""Answers as five more trainers dump them, each object as samples.

    skyrl      {"input_prompt": …, "output_response": …, "score": 1.0, "stop_reason": …}    an evaluation, 0.3.0
    areal      {"task_id": …, "tail_version": 3, "reward": 1.0, "prompt": …, "completion": …}   rollout.dump_to_file
    prime_rl   {"traces": [{"nodes": […], "rewards": {…}}], "group": {…}, "run": {…}}         verifiers 0.4.0
    nemo_rl    {"token_ids": [[…]], "token_loss_mask": [[…]], "generation_logprobs": [[…]]}   train_data_stepN.jsonl
    swift      {"step": ["3", …], "prompt": […], "completion": […], "accuracy": […]}          one line per step
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from creditscope.batch.jsonl import Bad, Row, check_fields, check_list
from creditscope.errors import unknown
from creditscope.offline.sample import Sample, Shape, name_of, number_of, prompt_of, reward_of, step_of, text_of

SWIFT_OWN = ("step", "prompt", "completion", "advantages")
_STEP_FILE = re.compile(r"train_data_step(\d{1,15})\.jsonl, line")


def _skyrl(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """A score per token is summed."""
    name = reward_field or "score"
    score = row[name]
    reward = sum(check_list(name, score, float, bad)) if isinstance(score, list) else reward_of(row, name, bad)
    return [Sample(where=where, reward=reward, prompt=prompt_of(row["input_prompt"], bad),
                   text=text_of(row["output_response"], "output_response", bad))]


def _areal(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """Answers of one task are a group; the step is the version of the policy that ended the answer."""
    return [Sample(where=where, reward=reward_of(row, reward_field or "reward", bad),
                   prompt=prompt_of(row["prompt"], bad), text=text_of(row["completion"], "completion", bad),
                   group=name_of(row["task_id"], bad), batch=step_of(row["tail_version"], bad))]


def _prime_rl(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """A sample per trace of a trained agent: r = Σ score · weight, or one entry of `rewards`."""
    group, step = _inner(row, "group", "id"), _inner(row, "run", "work", "step")
    samples = []
    for trace in check_list("traces", row["traces"], dict, bad):
        if _inner(trace, "agent", "trainable") is False:
            continue
        rewards = trace.get("rewards")
        chosen = {} if not isinstance(rewards, dict) else rewards if reward_field is None else \
            {name: rewards[name] for name in reward_field.split(",") if name in rewards}
        if not chosen:
            raise bad(f"a trace without {reward_field or 'rewards'}; leave it out, or name another with --reward-field")
        reward = sum(number_of(each.get("score"), name, bad) * number_of(each.get("weight", 1.0), name, bad)
                     for name, each in chosen.items() if isinstance(each, dict))
        nodes = _branch(check_list("nodes", trace.get("nodes"), dict, bad), bad)
        first = next((at for at, node in enumerate(nodes) if node.get("sampled")), len(nodes))
        prompt = [{"role": _inner(node, "message", "role"), "content": _inner(node, "message", "content")}
                  for node in nodes[:first]]
        prompt_tokens, fields = _tokens(nodes, bad)
        samples.append(Sample(
            where=where, reward=reward, prompt=prompt_of(prompt, bad) if prompt else None,
            text="".join(text_of(_inner(node, "message", "content") or "", "content", bad) for node in nodes[first:]
                         if node.get("sampled")),
            group=None if group is None else name_of(group, bad), batch=step_of(step, bad),
            prompt_tokens=prompt_tokens, fields=fields))
    if not samples:
        raise bad("an episode without a trace of a trained agent")
    return samples


def _branch(nodes: list[dict[str, Any]], bad: Bad) -> list[dict[str, Any]]:
    """The nodes from the root to the last one."""
    path: list[dict[str, Any]] = []
    at: Any = len(nodes) - 1
    while at is not None and at >= 0:
        if not isinstance(at, int) or len(path) > len(nodes) or at >= len(nodes):
            raise bad("the parents of the nodes are no tree")
        path.append(nodes[at])
        at = nodes[at].get("parent")
    return path[::-1]


def _tokens(nodes: list[dict[str, Any]], bad: Bad) -> tuple[list[int] | None, Row]:
    """(ids of the prompt, fields per token of the rest); nodes have log-probs of their sampled tokens alone."""
    ids: list[int] = []
    mask: list[bool] = []
    logp: list[float] = []
    for node in nodes:
        own = check_list("token_ids", node.get("token_ids"), int, bad)
        drawn = [bool(each) for each in node.get("mask") or [False] * len(own)]
        given = iter(check_list("logprobs", node.get("logprobs") or [], float, bad))
        if len(drawn) != len(own):
            raise bad(f"'mask' has {len(drawn)} entries for {len(own)} tokens")
        ids, mask = ids + own, mask + drawn
        logp += [next(given, 0.0) if each else 0.0 for each in drawn]
    return _after_prompt(ids, mask, logp if any(logp) else None, bad)


def _after_prompt(ids: list[int], mask: list[bool], logp: list[float] | None, bad: Bad) -> tuple[list[int] | None, Row]:
    """Tokens split where the first one was sampled."""
    if True not in mask:
        return None, {}
    first = mask.index(True)
    row: Row = {"tokens": ids[first:], "mask": mask[first:]} | ({} if logp is None else {"logp": logp[first:]})
    return ids[:first], check_fields(row, bad)


def _nemo_rl(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """Each value is a batch of one. Answers to one prompt of a step are a group; the step is in the file's name."""
    one = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in row.items()}
    size = step_of(one.get("input_lengths"), bad)
    ids = check_list("token_ids", one["token_ids"], int, bad)[:size]
    mask = [bool(each) for each in check_list("token_loss_mask", one["token_loss_mask"], int, bad)][:size]
    logp = check_list("generation_logprobs", one["generation_logprobs"], float, bad)[:size] \
        if "generation_logprobs" in one else None
    if len(mask) != len(ids) or (logp is not None and len(logp) != len(ids)):
        raise bad(f"'token_loss_mask' and 'generation_logprobs' must have one entry for each of {len(ids)} tokens")
    prompt, fields = _after_prompt(ids, mask, logp, bad)
    if prompt is None:
        raise bad("no token of 'token_loss_mask' is 1, so there is no answer")
    step = _STEP_FILE.search(where)
    return [Sample(where=where, reward=reward_of(one, reward_field or "rewards", bad), group=f"{prompt}",
                   batch=int(step[1]) if step else None, prompt_tokens=prompt, fields=fields)]


def _swift(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """Columns of one step. Rewards as TRL's: one column, or those of --reward-field summed."""
    columns = reward_field.split(",") if reward_field else _swift_numbers(row)
    if len(columns) != 1 and not reward_field:
        raise bad(f"several columns that may be rewards: {', '.join(columns) or 'none'}; give --reward-field "
                  f"{','.join(columns) or 'NAME'} (several are summed)")
    for column in columns:
        if column not in row:
            raise bad(str(unknown("--reward-field", column, _swift_numbers(row))))
    size = len(row["completion"])
    if any(not isinstance(row[name], list) or len(row[name]) != size for name in (*SWIFT_OWN[:3], *columns)):
        raise bad(f"step, prompt and rewards must have one entry for each of {size} completions")
    samples = []
    for at in range(size):
        step = row["step"][at]
        given = [row[column][at] for column in columns if row[column][at] is not None]
        if not given:
            raise bad(f"completion {at} has no reward")
        samples.append(Sample(
            where=where, reward=sum(number_of(value, columns[0], bad) for value in given),
            prompt=prompt_of(row["prompt"][at], bad), text=text_of(row["completion"][at], "completion", bad),
            batch=step_of(int(step) if isinstance(step, str) and step.isdecimal() and len(step) < 16 else step, bad)))
    return samples


def _swift_numbers(row: Mapping[str, Any]) -> list[str]:
    return [name for name, value in row.items() if name not in (*SWIFT_OWN, "entropy") and isinstance(value, list)
            and any(isinstance(each, int | float) for each in value)
            and all(isinstance(each, int | float | None) for each in value)]


def _inner(row: Any, *path: str) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def _has(*names: str) -> Any:
    return lambda row, reward: row.keys() >= set(names)


def _reads(*names: str) -> Any:
    return lambda row, reward: {*names, *([] if reward is None else reward.split(","))}


FOREIGN: dict[str, Shape] = {
    "skyrl": Shape("input_prompt, output_response, score", _has("input_prompt", "output_response"), _skyrl,
                   _reads("input_prompt", "output_response", "score")),
    "areal": Shape("task_id, tail_version, reward, prompt, completion",
                   _has("task_id", "tail_version", "prompt", "completion"), _areal,
                   _reads("task_id", "tail_version", "reward", "prompt", "completion")),
    "prime_rl": Shape("traces with nodes and rewards", lambda row, _: isinstance(row.get("traces"), list), _prime_rl,
                      _reads("traces", "group", "run")),
    "nemo_rl": Shape("token_ids, token_loss_mask, generation_logprobs, rewards",
                     _has("token_ids", "token_loss_mask"), _nemo_rl,
                     _reads("token_ids", "token_loss_mask", "generation_logprobs", "rewards", "input_lengths")),
    "swift": Shape("lists of step, prompt, completion, rewards and advantages",
                   lambda row, _: row.keys() >= set(SWIFT_OWN) and isinstance(row["completion"], list)
                   and isinstance(row["step"], list), _swift,
                   lambda row, reward: {*SWIFT_OWN, *(reward.split(",") if reward else _swift_numbers(row))},
                   repeats=True),
}
"""Name of the format -> its shape."""
