"""The questions whose seeds have start models of their own, stored ones, which can tell small differences apart.

Each was designed before it ran, in the study's part of `benchmarks/README.md`.
"""

from itertools import product

from cell import SHAPES, Cell, Question


FULL = "full precision"
BRIEF = {"learning_rate": 1e-4, "max_steps": 100}  # three quarters of what full precision gains in 300 steps
# With one update per generation acr is tis, and coupled's ratio never leaves w
REUSE = BRIEF | {"num_iterations": 2}
# The learning rate of the demo and of examples/rloo.py, and half of their batch
LEARNING = {"learning_rate": 1e-4, "per_device_train_batch_size": 64, "max_steps": 200, "evaluations": 10}
# GRPO's regime in `trainers`, with a start model for each seed
FLYING = LEARNING | {"num_iterations": 2, "evaluations": 4, "draws": 8, "starts": 6}
FACTORS = (1, 2, 3)
# In BF16 at factor 1 the corrections are one run but for rounding (`cost`); with two updates acr is nearly tis
FLOWN = (
    *(("tis", precision, factor) for precision, factor in product(("int4", "bf16"), FACTORS)),
    *((name, "int4", factor) for name, factor in product(("none", "coupled", "ais"), FACTORS)),
    *((name, "bf16", factor) for name, factor in product(("none", "coupled", "ais"), FACTORS[1:])),
    *(("dppo", precision, 2) for precision in ("int4", "bf16")),
)
# The same with one update a generation or four, and nothing in flight
STAGED = {updates: FLYING | {"num_iterations": updates} for updates in (1, 4)}
STAGED_CORRECTIONS = ("none", "tis", "acr", "ais", "icepop", "cis", "coupled")
# With one update acr is tis
STAGE_1 = tuple(
    (precision, name, updates)
    for precision, name, updates in product(("fp8", "int4"), STAGED_CORRECTIONS, STAGED)
    if (name, updates) != ("acr", 1)
)
# What a run in INT4 with four updates may choose
STAGE_2 = {name: {"is_correction": name} for name in ("tis", "none", "acr", "cis", "icepop")}
STAGE_2["tis, sequences,"] = {"is_correction": "tis", "importance_sampling_level": "sequence"}
STAGE_2["tis, scaled steps,"] = {"is_correction": "tis", "ess_step_scaling": True}
# The same with one update a generation, by `pace.py` and the asynchronous trainer. In BF16 at age 0 none, coupled and
# tis are one run but for rounding; ais differs by its advantages too
AGED = FLYING | {"num_iterations": 1, "max_steps": 300}
AGES = (0, 1, 3)
ASYNCHRONOUS = tuple(
    (precision, name, age)
    for precision, name, age in product(("bf16", "int8", "int4"), ("tis", "none", "coupled", "ais"), AGES)
    if (precision, age) != ("bf16", 0) or name in ("tis", "ais")
)
CORNER = tuple(("int4", name, 3) for name in ("none", "coupled"))  # both effects at their largest
MIXED = REUSE | {"draws": 8, "starts": 3, "num_experts": 8}
REPLAYED = tuple(product(("bf16", "int8", "fp8", "int4"), (True, False)))
# `stage_1`'s regime with one update, and the channels of `outliers`; what its runs may choose
SPREAD_STAGED = STAGED[1] | {"outliers": 128}
STAGE_3 = {name: {"is_correction": name} for name in ("tis", "none", "coupled", "ais", "icepop", "cis")}
STAGE_3["tis, sequences"] = {"is_correction": "tis", "importance_sampling_level": "sequence"}
# Two updates a generation, in the precision and with the corrections of `words`. Start 5 had not learned a third of the
# sums in 900 steps
RETOLD = REUSE | {"draws": 8, "starts": 6, "numbers": "0 1 2 3 4 6", "told": 1}
# Long rollouts of a weak model, as in the papers of Jet-RL and AIS: stories of 12 sums, and a model of 20M parameters
LONG_TOLD = RETOLD | dict(zip(("hidden_size", "num_hidden_layers"), SHAPES[1], strict=True))
LONG_TOLD |= {"numbers": "", "told": 12, "num_iterations": 1, "max_steps": 60, "evaluations": 3, "use_vllm": True}
IN_WORDS = ("tis", "none", "coupled", "acr", "ais", "cis")
# An adapter as in `adapter`, with a start model for each seed: the first tables of QeRL
ADAPTED = BRIEF | {"lora_rank": 16, "learning_rate": 1e-3, "draws": 8, "starts": 6}
SIGMAS = (0.01, 0.05)
# QuRL's table 4: INT8 samples, a step that changes few codes, and what scales the updates instead
SLOW = STAGED[1] | {"learning_rate": 1e-5, "max_steps": 300}
SCALES = (1.5, 2.0)
FASTER = SLOW | {"learning_rate": SCALES[0] * SLOW["learning_rate"]}
# `routing`'s mixtures in INT4, where most tokens are rerouted
JUMPING = tuple(product(("tis", "cis", "none"), (True, False)))


def staged(precision: str, correction: str, updates: int) -> str:
    """The name of a cell of `stage_1`."""
    return f"{precision} {correction} u{updates}"


def aged(precision: str, correction: str, age: int) -> str:
    """The name of a cell of `asynchronous`, or of the one that is the same run."""
    is_tis = (precision, age) == ("bf16", 0) and correction != "ais"
    return f"{precision} {'tis' if is_tis else correction} a{age}"


def routed(precision: str, replays: bool) -> str:
    """The name of a cell of `routing`."""
    return f"{precision} replay" if replays else f"{precision} no replay"


def jumping(correction: str, replays: bool) -> str:
    """The name of a cell of `stage_3_experts`."""
    return f"int4 {correction} {'replay' if replays else 'no replay'}"


REPLICATED = {
    "asynchronous": Question(
        "Where do the sampler's age and its precision add up, and what does each correction save?",
        (
            Cell(FULL, **AGED),
            *(
                Cell(aged(precision, name, age), precision, None, name, age=age, **AGED)
                for precision, name, age in ASYNCHRONOUS
            ),
        ),
        ("Held-out reward", "Mismatch by age"),
        {
            "final accuracy": "final_accuracy",
            "age": "rollouts/age",
            "oldest": "rollouts/age_max",
            **{f"KL at age {age}": f"mismatch/by_age/{age}" for age in (0, 1)},
            "KL at age 3": "mismatch/by_age/3-4",
        },
        compared={
            "primary: both at their largest, against tis": tuple(
                (aged(*cell), aged("int4", "tis", 3)) for cell in CORNER
            ),
            "other corrections, against tis": tuple(
                (aged(precision, name, age), aged(precision, "tis", age))
                for precision, name, age in ASYNCHRONOUS
                if name != "tis" and (precision, name, age) not in CORNER
            ),
            "age, with the same correction": tuple(
                (aged(precision, name, age), aged(precision, name, 0)) for precision, name, age in ASYNCHRONOUS if age
            ),
            "age and precision together, against each alone": tuple(
                (
                    f"{aged(precision, name, age)} + {aged('bf16', name, 0)}",
                    f"{aged(precision, name, 0)} + {aged('bf16', name, age)}",
                )
                for precision, name, age in ASYNCHRONOUS
                if precision != "bf16" and age
            ),
            "tis, against full precision": tuple(
                (aged(precision, "tis", age), FULL) for precision, name, age in ASYNCHRONOUS if name == "tis"
            ),
        },
    ),
    "routing": Question(
        "Does a mixture of experts learn better from quantized samples with the sampler's experts?",
        (
            Cell(FULL, **MIXED),
            *(
                Cell(routed(precision, replays), precision, None, "tis", router_replay=replays, **MIXED)
                for precision, replays in REPLAYED
            ),
        ),
        ("Held-out reward", "Mismatch KL", "Rerouted tokens"),
        {
            "final accuracy": "final_accuracy",
            "rerouted": "routing/differs",
            **{f"in layer {layer}": f"routing/by_layer/{layer}" for layer in (0, 1)},
        },
        compared={
            "primary: replay": tuple(
                (routed(precision, True), routed(precision, False)) for precision in dict(REPLAYED)
            ),
            "full precision": tuple((routed(*cell), FULL) for cell in REPLAYED),
        },
        ratios={"KL": "mismatch/kl_k3", "rerouted": "routing/differs"},
    ),
    "stage_1": Question(
        "Which corrections part from the default in FP8 and INT4, with one update a generation and with four?",
        (
            *(Cell(f"{FULL} u{updates}", **regime) for updates, regime in STAGED.items()),
            *(
                Cell(staged(precision, name, updates), precision, None, name, **STAGED[updates])
                for precision, name, updates in STAGE_1
            ),
        ),
        ("Held-out reward", "Mismatch KL"),
        {"final accuracy": "final_accuracy"},
        compared={
            "primary: none, against tis": tuple(
                (staged(precision, "none", updates), staged(precision, "tis", updates))
                for precision, updates in product(("fp8", "int4"), STAGED)
            ),
            "other corrections, against tis": tuple(
                (staged(precision, name, updates), staged(precision, "tis", updates))
                for precision, name, updates in STAGE_1
                if name not in ("none", "tis")
            ),
            "tis, against full precision": tuple(
                (staged(precision, "tis", updates), f"{FULL} u{updates}")
                for precision, updates in product(("fp8", "int4"), STAGED)
            ),
        },
    ),
    "stage_2": Question(
        "Which correction does a run in INT4 with four updates a generation need?",
        (
            Cell(f"{FULL} u4", **STAGED[4]),
            *(Cell(staged("int4", name, 4), "int4", **more | STAGED[4]) for name, more in STAGE_2.items()),
        ),
        ("Held-out reward", "Mismatch KL"),
        {"final accuracy": "final_accuracy"},
        compared={
            "primary: against tis": tuple((staged("int4", name, 4), "int4 tis u4") for name in [*STAGE_2][1:]),
            "against full precision": tuple((staged("int4", name, 4), f"{FULL} u4") for name in STAGE_2),
        },
    ),
    "stage_3_outliers": Question(
        "Which correction does a run in INT8 need, where activations have outliers?",
        (
            Cell(FULL, **SPREAD_STAGED),
            *(Cell(f"int8 {name}", "int8", **more | SPREAD_STAGED) for name, more in STAGE_3.items()),
        ),
        ("Held-out reward", "Mismatch KL"),
        {"final accuracy": "final_accuracy"},
        compared={
            "primary: against tis": tuple((f"int8 {name}", "int8 tis") for name in [*STAGE_3][1:]),
            "against full precision": tuple((f"int8 {name}", FULL) for name in STAGE_3),
        },
    ),
    "stage_3_text": Question(
        "Which correction does a run in MXFP4 need on text that is not known, at many words of which it is unsure?",
        (Cell(FULL, **RETOLD), *(Cell(f"mxfp4 {name}", "mxfp4", None, name, **RETOLD) for name in IN_WORDS)),
        ("Held-out reward", "Mismatch KL"),
        {"final accuracy": "final_accuracy"},
        compared={
            "primary: against tis": tuple((f"mxfp4 {name}", "mxfp4 tis") for name in IN_WORDS[1:]),
            "against full precision": tuple((f"mxfp4 {name}", FULL) for name in IN_WORDS),
        },
    ),
    "long_text": Question(
        "Long completions of text: sampled in BF16, in FP8 with a correction, or trained in FP8 too?",
        (
            Cell(FULL, **LONG_TOLD),  # TRL's BF16 vLLM, and its correction
            *(Cell(f"fp8 {name}", "fp8", None, name, **LONG_TOLD) for name in ("none", "tis", "ais")),
            Cell("fp8 unified", "fp8", "fp8", "none", **LONG_TOLD),
        ),
        ("Held-out reward", "Mismatch KL"),
        {"final accuracy": "final_accuracy"},
        compared={
            "primary: fp8 none, against full precision": (("fp8 none", FULL),),
            "remedies, against fp8 none": tuple((f"fp8 {name}", "fp8 none") for name in ("tis", "ais", "unified")),
            "remedies, against full precision": tuple((f"fp8 {name}", FULL) for name in ("tis", "ais", "unified")),
        },
    ),
    "scales": Question(
        "Where a step changes few codes of INT8: does scaling help, or a larger learning rate?",
        (
            Cell(FULL, **SLOW),
            Cell("int8", "int8", None, "tis", **SLOW),
            *(Cell(f"int8 s={scale:g}", "int8", None, "tis", scale, **SLOW) for scale in SCALES),
            Cell(f"{FULL} faster", **FASTER),
            Cell("int8 faster", "int8", None, "tis", **FASTER),
        ),
        ("Held-out reward", "Update against quantization error"),
        {
            "final accuracy": "final_accuracy",
            "update": "weights/normalized_update",
            "quantization error": "weights/normalized_quantization_error",
            "codes changed": "weights/codes_changed",
        },
        compared={
            "primary: the scale": tuple((f"int8 s={scale:g}", "int8") for scale in SCALES),
            "the learning rate": (("int8 faster", "int8"), (f"{FULL} faster", FULL)),
            "the scale, against that learning rate": tuple((f"int8 s={scale:g}", "int8 faster") for scale in SCALES),
            "against full precision": (("int8", FULL), *((f"int8 s={scale:g}", FULL) for scale in SCALES)),
        },
    ),
    "noisy_base": Question(
        "Does LoRA learn more on a base in NVFP4, and with noise in the sampler's norms?",
        (
            Cell(FULL, **ADAPTED),
            Cell("nvfp4", "nvfp4", "nvfp4", "coupled", **ADAPTED),
            *(
                Cell(
                    f"nvfp4 noise {sigma:g}",
                    "nvfp4",
                    "nvfp4",
                    "coupled",
                    None,
                    "exponential",
                    noise_sigma_start=sigma,
                    **ADAPTED,
                )
                for sigma in SIGMAS
            ),
        ),
        ("Held-out reward", "Entropy"),
        {"final accuracy": "final_accuracy", "noise": "noise/effective_sigma"},
        compared={
            "primary: the base, and the noise": (
                ("nvfp4", FULL),
                *((f"nvfp4 noise {sigma:g}", "nvfp4") for sigma in SIGMAS),
            ),
            "with noise, against full precision": tuple((f"nvfp4 noise {sigma:g}", FULL) for sigma in SIGMAS),
        },
    ),
    "stage_3_experts": Question(
        "Does cis, or replay, help a mixture of experts whose quantized sampler takes other experts?",
        (
            Cell(FULL, **MIXED),
            *(
                Cell(jumping(name, replays), "int4", None, name, router_replay=replays, **MIXED)
                for name, replays in JUMPING
            ),
        ),
        ("Held-out reward", "Mismatch KL", "Rerouted tokens"),
        {"final accuracy": "final_accuracy", "rerouted": "routing/differs"},
        compared={
            "primary: cis and none, against tis": tuple(
                (jumping(name, replays), jumping("tis", replays)) for name, replays in JUMPING if name != "tis"
            ),
            "replay": tuple((jumping(name, True), jumping(name, False)) for name in dict(JUMPING)),
            "full precision": tuple((jumping(*cell), FULL) for cell in JUMPING),
        },
        ratios={"KL": "mismatch/kl_k3"},
    ),
    "in_flight": Question(
        "What does the factor of completions in flight cost in accuracy, per correction?",
        (
            Cell(FULL, **FLYING),
            *(
                Cell(f"{precision} {name} x{factor}", precision, None, name, rollouts_in_flight=factor, **FLYING)
                for name, precision, factor in FLOWN
            ),
        ),
        ("Held-out reward", "Mismatch by age"),
        {
            "final accuracy": "final_accuracy",
            "age": "rollouts/age",
            **{f"KL at age {age}": f"mismatch/by_age/{age}" for age in (0, 1, 2)},
        },
        compared={
            "primary: the factor, with tis": tuple(
                (f"{precision} tis x{factor}", f"{precision} tis x1")
                for precision, factor in product(("int4", "bf16"), FACTORS[1:])
            ),
            "the factor, with other corrections": tuple(
                (f"{precision} {name} x{factor}", f"int4 {name} x1" if precision == "int4" else "bf16 tis x1")
                for name, precision, factor in FLOWN
                if name not in ("tis", "dppo") and factor > 1
            ),
            "the correction, at the same factor": tuple(
                (f"{precision} {name} x{factor}", f"{precision} tis x{factor}")
                for name, precision, factor in FLOWN
                if name != "tis" and factor > 1
            ),
        },
    ),
}
