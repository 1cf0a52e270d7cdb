"""The trainers whose logs are read, one per module; those that write TRL's log share one."""

import re

from creditscope.diagnosis.trainers.another import ANOTHER
from creditscope.diagnosis.trainers.areal import AREAL
from creditscope.diagnosis.trainers.easyr1 import EASYR1
from creditscope.diagnosis.trainers.nemo_rl import NEMO_RL
from creditscope.diagnosis.trainers.openrlhf import OPENRLHF
from creditscope.diagnosis.trainers.own import BY_TRL, OURS, SCRIPT, SCRIPT_OF_PAIRS, is_script, who_wrote
from creditscope.diagnosis.trainers.prime_rl import PRIME_RL
from creditscope.diagnosis.trainers.skyrl import SKYRL
from creditscope.diagnosis.trainers.through_trl import OPEN_R1, SWIFT, UNSLOTH
from creditscope.diagnosis.trainers.trainer import COMMON, FACTS, Trainer, parts
from creditscope.diagnosis.trainers.trl import TRL
from creditscope.diagnosis.trainers.trl_dpo import TRL_DPO
from creditscope.diagnosis.trainers.verl import VERL
from creditscope.runs import schema

__all__ = [
           "ANOTHER",
           "AREAL",
           "BY_TRL",
           "COMMON",
           "EASYR1",
           "FACTS",
           "FOREIGN",
           "HELD_OUT",
           "KNOWN",
           "NEMO_RL",
           "OPENRLHF",
           "OPEN_R1",
           "OURS",
           "PRIME_RL",
           "PROVING",
           "READ",
           "SCRIPT",
           "SCRIPT_OF_PAIRS",
           "SKYRL",
           "SWIFT",
           "TRAINERS",
           "TRL",
           "TRL_DPO",
           "UNSLOTH",
           "VERL",
           "Trainer",
           "is_script",
           "who_wrote",
]

FOREIGN = (TRL, VERL, OPENRLHF, SKYRL, AREAL, PRIME_RL, NEMO_RL, SWIFT, UNSLOTH, OPEN_R1, EASYR1)
"""Trainers of other projects that sample their answers."""
TRAINERS = (*FOREIGN, TRL_DPO, OURS)
READ = (*TRAINERS, ANOTHER)
"""Of equal matches the first: the names of another program are common ones, which TRL writes too."""
_METRICS = frozenset(name for trainer in (*READ, BY_TRL) for text in trainer.metrics.values()
                     for _, name in parts(text))
PROVING = frozenset({"vespo/phi_seq_mean"}).union(*(trainer.logged for trainer in TRAINERS),
                                                  *(trainer.marks for trainer in TRAINERS)) - _METRICS
"""Columns that are read only for the settings or the trainer that they prove."""
KNOWN = PROVING.union(schema.METRICS, _METRICS, *(names for trainer in READ for names in trainer.aliases.values()),
                    *(trainer.together for trainer in READ), *(trainer.proofs for trainer in READ))
"""Every metric that is kept in memory; those of the schema are in records, and in TRL's log as creditscope/…"""
HELD_OUT = re.compile("|".join(sorted({trainer.held_out for trainer in READ if trainer.held_out})))
"""Columns of held-out values."""
