"""The study's questions, each a table of cells: settings that are trained alike, once for each seed.

A cell's `reward` is that of `examples/build_arithmetic_model.py`: worked solutions of additions and subtractions. How
hard that is, and how long the completions are, is set by `digits`; how weak the model is at the start by `accuracy`.
Every question has, for each regime that it looks at, a cell in full precision, which the others are compared with.
"""

from itertools import product

from cell import SHAPES, Cell, Question


FULL = "full precision"
QUANTIZED = ("int8", "fp8", "nvfp4", "int4", "mxfp4")
CORRECTIONS = ("none", "coupled", "decoupled", "tis", "acr", "ais", "icepop", "geometric", "trm", "dppo")
FOUR_BITS = ("nvfp4", "mxfp4", "int4")
BRIEF = {"learning_rate": 1e-4, "max_steps": 100}  # three quarters of what full precision gains in 300 steps
# With one update per generation acr is tis, and coupled's ratio never leaves w
REUSE = BRIEF | {"num_iterations": 2}
# Of the sweep in `regimes`: full precision learns, MXFP4 samples end a completion of 99 tokens a nat away
OFTEN = {"learning_rate": 2e-4, "num_iterations": 4, "digits": 12, "max_steps": 100}
# On seed 100 full precision learned with this learning rate, not with that of `OFTEN`, and `none` had fallen by step 34
OFTEN_PPO = OFTEN | {"trainer": "ppo", "learning_rate": 1e-4, "max_steps": 60}
HALF_PPO = OFTEN_PPO | {"max_steps": 48, "per_device_train_batch_size": 64}
# On seed 100 rounding at the end cost 0.04 to 0.09 of accuracy here
ROUNDED = REUSE | {"digits": 12, "max_steps": 60}
ADAPTER = BRIEF | {"lora_rank": 16, "learning_rate": 1e-3}
OPTIMIZERS = {"adamw": BRIEF, "sgd": BRIEF | {"optim": "sgd", "learning_rate": 0.1}}
FASTER = {"adamw": 1.5e-4, "sgd": 0.225}  # by s and s squared, as the updates of what s = 1.5 scales
# Full precision is stable; INT8 samples a completion of 34 tokens two to four nats away
SPREAD = {"outliers": 128, "learning_rate": 1e-4}
NEAR = {"learning_rate": 1e-4, "max_steps": 2}
ENDURING = SPREAD | {"max_steps": 900}
LENGTHS = (3, 6, 12)
# 20M parameters: of smaller models full precision learns little
SEARCH = REUSE | {"countdown": 3, "learning_rate": 2.5e-5}
SEARCH |= {"hidden_size": SHAPES[1][0], "num_hidden_layers": SHAPES[1][1]}
RECITED = REUSE | {"word_problems": "openai/gsm8k"}
# The learning rate of the demo and of examples/rloo.py, and half of their batch
LEARNING = {"learning_rate": 1e-4, "per_device_train_batch_size": 64, "max_steps": 200, "evaluations": 10}
TRAINED = {  # trainer -> its settings, and the correction that is its default with samples of low precision
    "grpo": (LEARNING | {"num_iterations": 2}, "tis"),
    "rloo": (LEARNING, "tis"),
    "ppo": (LEARNING | {"num_iterations": 2}, "tis"),
    "distillation": (LEARNING | {"learning_rate": 3e-5}, "none"),
}
DENOISED = BRIEF | {"trainer": "diffusion"}  # on seed 100 better than with a learning rate of 3e-4
# On seed 100 `none` lost the task here; with channels 128 times as large it learned
DENOISED_SPREAD = DENOISED | {"outliers": 256, "max_steps": 200}
LONG = {"quotient": 24, "learning_rate": 1e-4, "use_vllm": True, "max_steps": 100}  # completions of 1000 tokens
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


QUESTIONS = {
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
    "regimes": Question(
        "Where does a quantized sampler without correction part from full precision?",
        tuple(
            Cell(
                f"{name} lr {lr:g} x{updates} {digits} digits from {accuracy:g}",
                precision,
                None,
                correction,
                learning_rate=lr,
                num_iterations=updates,
                digits=digits,
                accuracy=accuracy,
                max_steps=100,
            )
            for lr, updates, digits, accuracy in product((5e-5, 2e-4, 6e-4), (1, 4), (3, 12), (0.1, 0.33))
            for name, precision, correction in ((FULL, None, None), ("mxfp4 none", "mxfp4", "none"))
        ),
        ("Held-out reward",),
    ),
    "corrections": Question(
        "Which correction, in which precision of the sampler?",
        (
            Cell(FULL, **REUSE),
            *(
                Cell(f"{precision} {correction}", precision, None, correction, **REUSE)
                for precision, correction in product(QUANTIZED, CORRECTIONS)
            ),
        ),
    ),
    "reuse": Question(
        "Which correction, where four updates use a generation of long completions?",
        (Cell(FULL, **OFTEN), *(Cell(f"mxfp4 {name}", "mxfp4", None, name, **OFTEN) for name in CORRECTIONS)),
    ),
    "ppo": Question(
        "The same with PPO: which correction, where four updates use a generation of long completions?",
        (
            *(
                Cell(f"{name}{batch}", precision, None, correction, **settings)
                for batch, settings in (("", OFTEN_PPO), (", half the batch", HALF_PPO))
                for name, precision, correction in (
                    (FULL, None, None),
                    *((f"mxfp4 {name}", "mxfp4", name) for name in ("none", "tis", "acr")),
                )
            ),
        ),
        metrics={"rescued": "mismatch/rescued_fraction"},
    ),
    "cost": Question(
        "What does a correction cost where none is needed?",
        (Cell(FULL, **REUSE), *(Cell(f"bf16 {name}", "bf16", None, name, **REUSE) for name in CORRECTIONS)),
    ),
    "outliers": Question(
        "Which correction, where activations have outliers and INT8 samples nats away from the policy?",
        (
            Cell(FULL, **SPREAD),
            *(Cell(f"int8 {name}", "int8", None, name, **SPREAD) for name in CORRECTIONS if name != "acr"),
            *(
                Cell(
                    f"int8 tis, {unit}s{at}", "int8", None, "tis", is_cap=cap, importance_sampling_level=unit, **SPREAD
                )
                for unit, cap, at in (("sequence", None, ""), ("sequence", 10.0, ", C=10"), ("token", 10.0, ", C=10"))
            ),
            Cell("int8 unified", "int8", "int8", "none", **SPREAD),
        ),
    ),
    "distance": Question(
        "How many nats are between policy and sampler, by precision, the larger some channels of the activations are?",
        tuple(
            Cell(f"{precision} channels x{outliers:g}", *sampled, outliers=outliers, **NEAR)
            for precision, *sampled in ((FULL,), *((name, name, None, "none") for name in QUANTIZED))
            for outliers in (1.0, 8.0, 32.0, 128.0, 512.0)
        ),
        panels=(),
    ),
    "endurance": Question(
        "The same, three times as long: what falls later, and what catches up with full precision?",
        (
            Cell(FULL, **ENDURING),
            *(Cell(f"int8 {name}", "int8", None, name, **ENDURING) for name in ("none", "tis", "ais")),
            Cell("int8 tis, sequences", "int8", None, "tis", importance_sampling_level="sequence", **ENDURING),
            Cell("int8 unified", "int8", "int8", "none", **ENDURING),
        ),
    ),
    "uaq": Question(
        "What does update-aware scaling gain, with Adam and with SGD, and a larger learning rate instead?",
        tuple(
            cell
            for optimizer, settings in OPTIMIZERS.items()
            for cell in (
                Cell(f"{FULL} {optimizer}", **settings),
                *(
                    Cell(f"{precision} {optimizer} s={scale or 1:g}", precision, None, "tis", scale, **settings)
                    for precision, scale in product(("int8", "fp8"), (None, 1.5))
                ),
                *(
                    Cell(f"{name} {optimizer} faster", *sampled, **settings | {"learning_rate": FASTER[optimizer]})
                    for name, *sampled in ((FULL,), ("int8", "int8", None, "tis"))
                ),
            )
        ),
        ("Held-out reward", "Update against quantization error"),
        {
            "update": "weights/normalized_update",
            "quantization error": "weights/normalized_quantization_error",
            "codes changed": "weights/codes_changed",
        },
    ),
    "noise": Question(
        "When does noise on the sampler help, and under which correction?",
        (
            Cell(FULL, **REUSE),
            *(
                Cell(f"nvfp4 {correction} {schedule or 'silent'}", "nvfp4", None, correction, None, schedule, **REUSE)
                for correction in ("none", "coupled", "acr")
                for schedule in (None, "exponential", "linear", "cosine", "logarithmic")
            ),
        ),
        ("Held-out reward", "Entropy"),
        {"noise": "noise/effective_sigma"},
    ),
    "adapter": Question(
        "Q(W + BA), merged before quantizing, or Q(W) + BA?",
        (
            Cell(FULL, **ADAPTER),
            *(
                Cell(f"{precision} merged {correction}", precision, None, correction, **ADAPTER)
                for precision, correction in product(("nvfp4", "mxfp4"), ("none", "tis"))
            ),
            *(
                Cell(f"{precision} beside {correction}", None, precision, correction, **ADAPTER)
                for precision, correction in product(("nvfp4", "mxfp4"), ("none", "tis"))
            ),
        ),
    ),
    "unified": Question(
        "Train in the sampler's precision, or correct for it?",
        (
            Cell(FULL, **REUSE),
            *(
                Cell(f"{precision} unified", None, precision, "none", **REUSE)
                for precision in ("int8", "fp8", "fp8_block")
            ),
            *(
                Cell(f"{precision} {correction}", precision, None, correction, **REUSE)
                for precision, correction in product(("int8", "fp8", "fp8_block"), ("none", "tis", "acr"))
            ),
        ),
    ),
    "qat": Question(
        "A model to serve in 4 bits: trained so, trained as an adapter on a base in 4 bits, or quantized at the end?",
        (
            Cell(FULL, served=" ".join(FOUR_BITS), **REUSE),
            *(Cell(f"{name} tis", name, None, "tis", served=name, **REUSE) for name in FOUR_BITS),
            *(Cell(f"{name} all weights", None, name, "none", served=name, **REUSE) for name in FOUR_BITS),
            Cell(f"{FULL}, adapter", **ADAPTER),
            *(Cell(f"{name} frozen base", None, name, "none", served=name, **ADAPTER) for name in ("nvfp4", "mxfp4")),
            Cell(f"{FULL}, 12 digits", served=" ".join(FOUR_BITS), **ROUNDED),
            *(Cell(f"{name} all weights, 12 digits", None, name, "none", served=name, **ROUNDED) for name in FOUR_BITS),
        ),
        metrics={f"served in {name}": f"served/{name}" for name in FOUR_BITS},
    ),
    "rollouts": Question(
        "Long completions of a weak model: sampled in FP8 and trained in BF16, or both in FP8?",
        (
            Cell(FULL, **LONG),  # TRL's BF16 vLLM, and its correction
            *(Cell(f"fp8_block {name}", "fp8_block", None, name, **LONG) for name in ("none", "tis")),
            Cell("fp8_block unified", "fp8_block", "fp8_block", "none", **LONG),
        ),
        ("Held-out reward", "Mismatch by position"),
    ),
    "scale": Question(
        "Does a larger model need a correction where a small one does?",
        tuple(
            Cell(
                f"{name} {width}x{layers}",
                *sampled,
                hidden_size=width,
                num_hidden_layers=layers,
                **REUSE | {"learning_rate": 1e-4 * SHAPES[0][0] / width},
            )
            for width, layers in SHAPES
            for name, *sampled in (
                (FULL,),
                ("fp8 none", "fp8", None, "none"),
                *((f"nvfp4 {name}", "nvfp4", None, name) for name in ("none", "coupled", "tis")),
            )
        ),
    ),
    "countdown": Question(
        "And where the answer is searched for, and not computed?",
        (
            Cell(FULL, **SEARCH),
            Cell("fp8 none", "fp8", None, "none", **SEARCH),
            *(Cell(f"nvfp4 {name}", "nvfp4", None, name, **SEARCH) for name in ("none", "coupled", "tis")),
            *(
                Cell(f"mxfp4 {name}", "mxfp4", None, name, **SEARCH)
                for name in ("none", "coupled", "tis", "acr", "ais")
            ),
        ),
    ),
    "words": Question(
        "And in real text, at every word of which the model is unsure?",
        (
            Cell(FULL, **RECITED),
            *(Cell(f"{precision} none", precision, None, "none", **RECITED) for precision in ("int8", "fp8", "nvfp4")),
            *(
                Cell(f"mxfp4 {name}", "mxfp4", None, name, **RECITED)
                for name in ("none", "coupled", "tis", "acr", "ais")
            ),
        ),
    ),
    "trainers": Question(
        "Does each trainer learn from INT8 and INT4 samples as from its own, with its default correction?",
        tuple(
            Cell(
                f"{trainer} {precision or FULL}",
                precision,
                None,
                precision and correction,
                trainer=trainer,
                **settings,
            )
            for trainer, (settings, correction) in TRAINED.items()
            for precision in (None, "int8", "int4")
        ),
        ("Held-out reward",),
        by_regime=True,
    ),
    "diffusion": Question(
        "Which correction, where a masked diffusion model denoises in low precision?",
        (
            Cell(FULL, **DENOISED),
            *(
                Cell(f"{precision} {name}", precision, None, name, **DENOISED)
                for precision, name in product(("fp8", "int8", "int4", "mxfp4"), ("none", "tis", "ais"))
            ),
            Cell(f"{FULL}, outliers", **DENOISED_SPREAD),
            *(
                Cell(f"int8 {name}, outliers", "int8", None, name, **DENOISED_SPREAD)
                for name in ("none", "tis", "ais", "coupled")
            ),
            Cell("int8 unified, outliers", "int8", "int8", "none", **DENOISED_SPREAD),
        ),
        ("Held-out reward",),
    ),
    "length": Question(
        "How does the mismatch grow with position and length?",
        tuple(
            Cell(f"{name} {digits} digits", precision, None, correction, digits=digits, **BRIEF)
            for digits in LENGTHS
            for name, precision, correction in (
                (FULL, None, None),
                ("fp8 none", "fp8", "none"),
                ("mxfp4 none", "mxfp4", "none"),
            )
        ),
        ("Held-out reward", "Mismatch by position"),
    ),
}
