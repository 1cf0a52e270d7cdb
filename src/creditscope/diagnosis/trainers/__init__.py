"""The trainers whose logs are read, one per module."""

from creditscope.diagnosis.trainers.another import ANOTHER
from creditscope.diagnosis.trainers.own import BY_TRL, OURS, SCRIPT, SCRIPT_OF_PAIRS, is_script, who_wrote
from creditscope.diagnosis.trainers.trainer import FACTS, Trainer
from creditscope.diagnosis.trainers.trl import TRL
from creditscope.diagnosis.trainers.trl_dpo import TRL_DPO
from creditscope.diagnosis.trainers.verl import VERL
from creditscope.runs import schema

__all__ = [
           "ANOTHER",
           "BY_TRL",
           "FACTS",
           "KNOWN",
           "OURS",
           "PROVING",
           "READ",
           "SCRIPT",
           "SCRIPT_OF_PAIRS",
           "TRAINERS",
           "TRL",
           "TRL_DPO",
           "VERL",
           "Trainer",
           "is_script",
           "who_wrote",
]

TRAINERS = (TRL, TRL_DPO, VERL, OURS)
READ = (*TRAINERS, ANOTHER)
"""Of equal matches the first: the names of another program are common ones, which TRL writes too."""
PROVING = frozenset({"vespo/phi_seq_mean"}).union(*(trainer.logged for trainer in TRAINERS))
"""Metrics that are read only for the settings they prove."""
KNOWN = PROVING.union(schema.METRICS, *(trainer.metrics.values() for trainer in (*READ, BY_TRL)),
                    *(names for trainer in READ for names in trainer.aliases.values()))
"""Every metric that is kept in memory; those of the schema are in records, and in TRL's log as creditscope/…"""
