"""On PYTHONPATH, every process of creditscope knows the task of `mini`, also on a node of a cluster."""

import sys

if {"creditscope", "creditscope.cli.ray_node"} & set(sys.orig_argv):
    import mini
    from creditscope import tasks

    tasks.TASKS = {**tasks.TASKS, mini.TASK: f"{mini.__name__}:Coins"}  # type: ignore[assignment]
