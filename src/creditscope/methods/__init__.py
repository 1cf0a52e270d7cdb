"""Every method as one row of data: the axes and their values, the table, what TRL and verl compute, and words for it.

    axes      Method: a row, and the values that each axis can take
    table     the rows, each a cited diff of another
    dialects  the same names as TRL and verl compute them
    find      a row by name
    words     a row as equations and sentences

No torch.
"""

from creditscope.methods.axes import AXES, Method
from creditscope.methods.table import (
    BNPO,
    CISPO,
    CPPO,
    CPPO_TOPK,
    DAPO,
    DPPO,
    DPPO_KL,
    DR_GRPO,
    DRO,
    GCPO,
    GMPO,
    GPG,
    GRPO,
    GRPO_EVEN,
    GRPO_V32,
    GSPO,
    GSPO_EVEN,
    GSPO_TOKEN,
    GTPO,
    KIMI,
    LUSPO,
    MAXRL,
    METHODS,
    OPO,
    P1_GRPO,
    P2_TABLE_1,
    PPO,
    REINFORCE,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    RLOO,
    SAPO,
    VESPO,
)

__all__ = [
    "AXES",
    "BNPO",
    "CISPO",
    "CPPO",
    "CPPO_TOPK",
    "DAPO",
    "DPPO",
    "DPPO_KL",
    "DRO",
    "DR_GRPO",
    "GCPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GRPO_EVEN",
    "GRPO_V32",
    "GSPO",
    "GSPO_EVEN",
    "GSPO_TOKEN",
    "GTPO",
    "KIMI",
    "LUSPO",
    "MAXRL",
    "METHODS",
    "OPO",
    "P1_GRPO",
    "P2_TABLE_1",
    "PPO",
    "REINFORCE",
    "REINFORCE_PP",
    "REINFORCE_PP_BASELINE",
    "RLOO",
    "SAPO",
    "VESPO",
    "Method",
]
