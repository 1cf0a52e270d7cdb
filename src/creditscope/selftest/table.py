"""The checks, one row each, in the order in which they run."""

from __future__ import annotations

from functools import partial

from creditscope.selftest import conformance, formulas, gram, instrument, sketch, training
from creditscope.selftest.check import SelftestCheck

FLOAT64 = "float64 rounds at 2.2e-16, and a product sums up to 10⁵ terms"
EXACT = "equal means equal: one difference fails"

CHECKS = (
    SelftestCheck(name="gram/packaged", run=gram.packaged, tolerance=1e-11, why=FLOAT64,
        what="Gram of every parameter of the packaged model, and in total, against one backward per rollout: "
             "max|ΔK|/max|K|"),
    SelftestCheck(name="gram/shapes", run=gram.shapes, tolerance=1e-11, why=FLOAT64,
        what="the same for random Llama (untied and tied head), GPT-2 (Conv1D, biases, positions), Qwen2 (biases) "
             "and Qwen3 (norms at q and k)"),
    SelftestCheck(name="gram/checkpointing", run=gram.checkpointed, tolerance=1e-11, why=FLOAT64,
        what="the same under gradient checkpointing, reentrant and not"),
    SelftestCheck(name="gram/float32", run=gram.own_precision, tolerance=1e-4,
        why="the microscope's own tolerance for float32: a pass in float32 rounds at 6e-8 in every layer",
        what="the packaged model in float32 on this device, against the loop in float64: max|ΔK|/max|K|"),
    SelftestCheck(name="gram/bfloat16", run=gram.bfloat16, tolerance=2e-2, needs="cuda",
        why="the microscope's own tolerance for bfloat16, which has 8 bits",
        what="the packaged model in bfloat16 on this device's kernels, against one backward per rollout in bfloat16"),
    SelftestCheck(name="gram/kernels", run=gram.gpu_routes, tolerance=1e-3, needs="cuda",
        why="per-rollout gradients are rounded to bfloat16 (4e-3 each), which averages out over a layer's entries",
        what="each route of the GPU kernels (plain, one pass, ghost, fused) against float64 products of the same "
             "factors"),
    SelftestCheck(name="selfcheck/green", run=instrument.agrees, tolerance=1e-11, why=FLOAT64,
        what="Σ_ij K_ij = ‖∇‖² for every parameter, relative to Σ_i K_ii + ‖∇‖²"),
    SelftestCheck(name="selfcheck/red", run=instrument.goes_red, tolerance=0, why="every planted error must be refused",
        what="planted errors that the microscope did not refuse: wrong scales, an unseen head, mixed rows, wrong "
             "owners, an infinite loss"),
    SelftestCheck(name="sketch/unbiased", run=sketch.unbiased, tolerance=5,
        why="5 standard errors: by chance once in 10⁵ tables of ten entries; the seeds are fixed",
        what="mean sketched Gram against the exact one, in standard errors as the sketches state them"),
    SelftestCheck(name="sketch/error", run=sketch.stated_error, tolerance=0.5,
        why="48 seeds leave a standard error of 12 % in the ratio; 0.5 is a factor of 1.41, set after a first look",
        what="|log₂| of the sketches' real mean square error over the one they state"),
    SelftestCheck(name="methods/twin", run=formulas.methods, tolerance=1e-7,
        why="central differences with step 1e-5 were off by 3e-10 where this was written",
        what="w of every method of the table, at three distances from the sampler and at its own bounds, against a "
             "twin in plain Python: max|Δw|/max|w|"),
    SelftestCheck(name="methods/verdicts", run=formulas.verdicts, tolerance=0, why=EXACT,
        what="verdicts of `creditscope papers check --exact` (closed forms, enumeration of every group) that differ "
             "from the published ones; on the CPU"),
    SelftestCheck(name="optimizer/adamw", run=formulas.replayed, tolerance=1e-12,
        why="eight steps of float64, |θ| about 1",
        what="AdamW in closed form against torch.optim.AdamW on this device, plain, foreach and fused: max|Δθ|"),
    SelftestCheck(name="optimizer/carry", run=formulas.carried, tolerance=1e-9,
        why="the closed form takes ε for 0; beside a gradient of 1e6 it is 1e-14, and θ of up to 50 rounds",
        what="what momentum still moves after the clip has stopped a token, closed form against AdamW, in full "
             "steps"),
    SelftestCheck(name="conformance/trl", run=partial(conformance.stored, "trl"), tolerance=1,
        why="the unit is each case's own tolerance, 1e-10 of max|w|: both sides are float64",
        what="w of our TRL rows against arrays from TRL's own trainers; on the CPU"),
    SelftestCheck(name="conformance/verl", run=partial(conformance.stored, "verl"), tolerance=1,
        why="the unit is each case's own tolerance: 1e-12, or up to 4e-8 where verl adds 1e-8 to a denominator",
        what="w of our verl rows against arrays from verl's own code; on the CPU"),
    SelftestCheck(name="conformance/trl live", run=conformance.live, tolerance=1e-10, needs="trl",
        why="both sides are float64",
        what="w of our TRL rows against the trainers of the TRL that is installed here: max|Δw|/max|w|"),
    SelftestCheck(name="training/gradient", run=training.same_gradient, tolerance=1e-11, why=FLOAT64,
        what="the gradient that the optimiser gets under the microscope, against a plain backward: max|Δ∇|/max|∇|"),
    SelftestCheck(name="training/bits", run=training.same_bits, tolerance=0, why=EXACT,
        what="weights and recorded numbers of a training run that readings in passes of their own changed; on the "
             "CPU"),
    SelftestCheck(name="training/trl bits", run=training.trl_bits, tolerance=0, needs="trl", why=EXACT,
        what="weights of a GRPOTrainer of the TRL installed here that `ScopeCallback` changed; on the CPU"),
    SelftestCheck(name="training/resume", run=training.resumed, tolerance=0, why=EXACT,
        what="weights and recorded numbers that differ between a whole run and one cut and resumed; on the CPU"),
    SelftestCheck(name="record/round trip", run=training.round_trip, tolerance=0, why=EXACT,
        what="numbers, text and arrays that a record gives back otherwise than they were written"),
)
