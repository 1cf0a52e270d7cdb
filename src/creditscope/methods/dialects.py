"""TRL 1.16's and verl 0.9.1's versions of a method, each as its difference from the paper's row.

`docs/conformance.md` shows these rows beside the libraries' own code. Factors that no axis carries are listed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from creditscope.errors import unknown
from creditscope.methods import table
from creditscope.methods.axes import Method

# TRL: sample std + 1e-4, every row counted, KL times the live ratio (since 1.10), a group of one gets 0.
_TRL = {"std_eps": 1e-4, "lone": "zero", "denominator": "all"}
_TRL_KL = {"kl": "k3", "kl_weight": "ratio"}

TRL_GRPO = table.GRPO.but(name="trl_grpo", **_TRL, **_TRL_KL)
TRL_DR_GRPO = table.DR_GRPO.but(name="trl_dr_grpo", **_TRL, **_TRL_KL)
TRL_DAPO = table.DAPO.but(name="trl_dapo", **_TRL, **_TRL_KL, clip_high=0.2, keep="all",
                          note="No dynamic sampling: unanimous groups stay and dilute. ε_high defaults to ε.")
TRL_BNPO = table.BNPO.but(
    name="trl_bnpo", **_TRL, **_TRL_KL, scale="group_std", aggregate="token_mean", local=True,
    clip_high=0.2, note="A token mean over the local batch; none of the paper's Beta normalisation.")
TRL_CISPO = table.CISPO.but(
    name="trl_cispo", **_TRL, **_TRL_KL, clip_high=-0.8,
    note="epsilon_high is an absolute ceiling on the ratio: its default scales w by 0.2 at ratio 1.")
TRL_SAPO = table.SAPO.but(name="trl_sapo", **_TRL, **_TRL_KL)
TRL_GSPO = table.GSPO.but(name="trl_gspo", **_TRL, **_TRL_KL,
                          note="importance_sampling_level='sequence' with loss_type='grpo'.")
TRL_LUSPO = table.LUSPO.but(name="trl_luspo", **_TRL, **_TRL_KL)
TRL_VESPO = table.VESPO.but(name="trl_vespo", **_TRL, note="TRL also clamps the log-ratio to [log 1e-8, 20].")
TRL_GRPO_V32 = table.GRPO.but(name="trl_grpo_v32", **(_TRL | {"std_eps": 0.0}), **_TRL_KL, scale="none",
                              trust="off_policy_sequence", trust_high=0.5,
                              note="scale_rewards='none', off_policy_mask_threshold=0.5.")
TRL_GRPO_BATCH = TRL_GRPO.but(name="trl_grpo_batch", scale="batch_std", note="scale_rewards='batch'.")
TRL_RLOO = table.RLOO.but(
    name="trl_rloo", lone="zero", aggregate="sequence_mean", ratio="sequence_product",
    bound="clip", clip_low=0.2, clip_high=0.2, note="A clipped sequence ratio where the paper has none.")

# TRL's preference trainers: means over pairs; the supervised term of CPO and ORPO is a mean over tokens.
TRL_DPO = table.DPO.but(name="trl_dpo", note="DPOConfig(loss_type='sigmoid').")
TRL_DPO_HINGE = table.SLIC.but(name="trl_dpo_hinge", note="DPOConfig(loss_type='hinge').")
TRL_DPO_ROBUST = table.RDPO.but(name="trl_dpo_robust", flip=0.0,
                                note="DPOConfig(loss_type='robust'); flip is label_smoothing, 0 by default.")
TRL_DPO_NORM = table.DPO.but(name="trl_dpo_norm", score="log_ratio_mean",
                             note="DPOConfig(loss_type='sigmoid_norm'): log-ratios are means over the tokens.")
TRL_IPO = table.IPO.but(name="trl_ipo", score="log_ratio_mean",
                        note="DPOConfig(loss_type='ipo'): log-ratios are means over the tokens, so 1/L_i is back.")
TRL_CPO = table.CPO.but(name="trl_cpo", sft_mean="tokens", note="CPOConfig(loss_type='sigmoid').")
TRL_SIMPO = table.SIMPO.but(name="trl_simpo", beta=0.1, margin=0.5, sft=1.0, sft_mean="tokens",
                            note="CPOConfig(loss_type='simpo'): cpo_alpha is 1 by default, which adds CPO's supervised "
                                 "term; SimPO has none.")
TRL_ORPO = table.ORPO.but(name="trl_orpo", sft_mean="tokens",
                          note="ORPOConfig's beta is λ. TRL's supervised term also counts the prompt's tokens.")
TRL_KTO = table.KTO.but(name="trl_kto", note="KTOConfig(): z is the mean score of answers paired with other prompts.")
TRL_APO_ZERO = table.KTO.but(name="trl_apo_zero_unpaired", anchor="none",
                             note="KTOConfig(loss_type='apo_zero_unpaired').")

TRL_DPO_LOSSES = {"sigmoid": TRL_DPO, "hinge": TRL_DPO_HINGE, "robust": TRL_DPO_ROBUST, "ipo": TRL_IPO,
                  "sigmoid_norm": TRL_DPO_NORM}
"""DPOConfig.loss_type -> row, for those that the axes carry: β is `beta`, flip `label_smoothing`."""

# loss_type -> row at its usual importance_sampling_level; scale_rewards -> scale.
TRL_LOSSES = {"grpo": TRL_GRPO, "dr_grpo": TRL_DR_GRPO, "dapo": TRL_DAPO, "bnpo": TRL_BNPO, "cispo": TRL_CISPO,
              "sapo": TRL_SAPO, "luspo": TRL_LUSPO, "vespo": TRL_VESPO}
TRL_SCALES = {"group": "group_std", "batch": "batch_std", "none": "none", "True": "group_std", "False": "none"}
TRL_RATIOS = {"token": "token", "sequence": "sequence_mean"}


def trl_row(loss_type: str, level: str, scale: str) -> Method:
    """The row of TRL's loss_type, importance_sampling_level and scale_rewards; clip ranges and β are the caller's.

    The level sets the ratio of every loss but vespo, which always takes the sequence's product.

    >>> trl_row("grpo", "sequence", "group").name, trl_row("luspo", "token", "group").ratio
    ('trl_gspo', 'token')
    """
    for name, value, choices in (("loss_type", loss_type, TRL_LOSSES), ("scale_rewards", scale, TRL_SCALES),
                                 ("importance_sampling_level", level, TRL_RATIOS)):
        if value not in choices:
            raise unknown(name, value, choices)
    row = TRL_LOSSES[loss_type]
    if row.ratio != "sequence_product":
        row = TRL_GSPO if row is TRL_GRPO and level == "sequence" else row.replace(ratio=TRL_RATIOS[level])
    return row.replace(scale=TRL_SCALES[scale])


def trl_dpo_row(losses: Sequence[str], weights: Sequence[float] | None, beta: float, flip: float) -> Method | None:
    """The row of DPOConfig's loss_type, loss_weights, beta and label_smoothing: one loss of TRL_DPO_LOSSES, with or
    without 'sft' beside it; None for any other sum.

    >>> row = trl_dpo_row(["sigmoid", "sft"], [0.8, 0.5], 0.1, 0.0)
    >>> row and (row.name, row.link_weight, row.sft, row.sft_mean)
    ('trl_dpo', 0.8, 0.5, 'tokens')
    """
    given = dict(zip(losses, weights or [1.0] * len(losses), strict=True))
    sft = given.pop("sft", 0.0)
    if len(given) != 1 or len(losses) != len(set(losses)) or not {*given} <= {*TRL_DPO_LOSSES}:
        return None
    (name, weight), = given.items()
    row = TRL_DPO_LOSSES[name]
    return row.replace(beta=beta, flip=None if row.flip is None else flip, link_weight=weight, sft=sft,
                       sft_mean="tokens" if sft else row.sft_mean)


# verl: sample std + 1e-6, empty rows not counted, dual clip at 3, a group of one keeps its raw reward.
_VERL = {"lone": "keep", "denominator": "kept"}
_VERL_STD = _VERL | {"std_eps": 1e-6}
_VERL_CLIP = {"bound": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "ratio": "token"}

VERL_GRPO = table.GRPO.but(name="verl_grpo", **_VERL_STD, dual_clip=3.0, aggregate="token_mean",
                           note="Token mean unless loss_agg_mode says otherwise.")
VERL_GRPO_SEQ = VERL_GRPO.but(name="verl_grpo_seq", aggregate="sequence_mean",
                              note="loss_agg_mode='seq-mean-token-mean'.")
VERL_DR_GRPO = table.DR_GRPO.but(name="verl_dr_grpo", **_VERL, dual_clip=3.0,
                                 note="norm_adv_by_std_in_grpo=False, loss_agg_mode='seq-mean-token-sum-norm'.")
VERL_DAPO = table.DAPO.but(name="verl_dapo", **_VERL_STD, dual_clip=3.0, keep="all",
                           note="Dynamic sampling is the trainer's: the loss sees what was kept.")
VERL_RLOO = table.RLOO.but(name="verl_rloo", **_VERL, **_VERL_CLIP, aggregate="token_mean", kl="none", kl_in="loss",
                           note="Leave-one-out advantages in the clipped token-mean loss.")
VERL_OPO = table.OPO.but(name="verl_opo", **_VERL, **_VERL_CLIP, aggregate="token_mean",
                         note="Length-weighted baseline in the clipped token-mean loss.")
VERL_REINFORCE_PP = table.REINFORCE_PP.but(name="verl_reinforce_pp", **_VERL, dual_clip=3.0, whiten_eps=1e-8)
VERL_REINFORCE_PP_BASELINE = table.REINFORCE_PP_BASELINE.but(name="verl_reinforce_pp_baseline", **_VERL, dual_clip=3.0,
                                                             whiten_eps=1e-8)
VERL_PPO = table.PPO.but(name="verl_ppo", **_VERL, dual_clip=3.0)
VERL_GSPO = table.GSPO_TOKEN.but(name="verl_gspo", **_VERL_STD, note="verl's 'gspo' is GSPO-token.")
VERL_GMPO = table.GMPO.but(name="verl_gmpo", **(_VERL_STD | {"denominator": "all"}),
                           note="'geo_mean' averages over all rows, empty ones too.")
VERL_SAPO = table.SAPO.but(name="verl_sapo", **_VERL_STD)
VERL_CISPO = table.CISPO.but(name="verl_cispo", **_VERL_STD, clip_low=0.2, clip_high=0.2,
                             note="The ratio is clipped on both sides, as a change of 1.")
VERL_GPG = table.GPG.but(
    name="verl_gpg", **_VERL, scale="nonzero_rewards",
    note="α counts rollouts with non-zero reward; the authors count groups that are not unanimous.")
VERL_DPPO = table.DPPO.but(
    name="verl_dppo", **_VERL, aggregate="token_mean", clip_high=2.0,
    note="The ratio's ceiling is clip_ratio_c: 3 by config; the loss's own default 20 never acts.")
VERL_DPPO_KL = table.DPPO_KL.but(name="verl_dppo_kl", **_VERL, aggregate="token_mean", clip_high=2.0,
                                 note="The ratio's ceiling is clip_ratio_c, as in `verl_dppo`.")
VERL_DRO = table.DRO.but(name="verl_dro", **_VERL_STD)

DIALECTS: Mapping[str, Method] = MappingProxyType(
    {row.name: row for row in tuple(globals().values()) if isinstance(row, Method)})  # every row above, in its order
