"""The study's questions, each a table of cells: settings that are trained alike, once for each seed.

A cell's `reward` is that of `examples/build_arithmetic_model.py`: worked solutions of additions and subtractions. How
hard that is, and how long the completions are, is set by `digits`; how weak the model is at the start by `accuracy`.
Every question has, for each regime that it looks at, a cell in full precision, which the others are compared with.
Questions with a start model for each seed are in `replicated.py`.
"""

from itertools import product

from cell import SHAPES, Cell, Question
from replicated import BRIEF, FULL, LEARNING, REPLICATED, REUSE


QUANTIZED = ("int8", "fp8", "nvfp4", "int4", "mxfp4")
CORRECTIONS = ("none", "coupled", "decoupled", "tis", "acr", "ais", "icepop", "geometric", "trm", "dppo")
FOUR_BITS = ("nvfp4", "mxfp4", "int4")
# Of the sweep in `regimes`: full precision learns, MXFP4 samples end a completion of 99 tokens a nat away
OFTEN = {"learning_rate": 2e-4, "num_iterations": 4, "digits": 12, "max_steps": 100}
# On seed 100 full precision learned with this learning rate, not with that of `OFTEN`, and `none` had fallen by step 34
OFTEN_PPO = OFTEN | {"trainer": "ppo", "learning_rate": 1e-4, "max_steps": 60}
HALF_PPO = OFTEN_PPO | {"max_steps": 48, "per_device_train_batch_size": 64}
# On seed 100 rounding at the end cost 0.04 to 0.08 of accuracy here
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


QUESTIONS = REPLICATED | {
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
