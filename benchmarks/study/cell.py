"""A cell of the study, which is trained once for each seed, and a question, which is a table of cells."""

from dataclasses import asdict, dataclass, field

from trl_quant.tasks.arithmetic import Division


# What distinguishes a cell from full precision in its regime; what else differs is the regime.
TREATMENT = (
    "rollout_precision",
    "train_precision",
    "is_correction",
    "is_cap",
    "importance_sampling_level",
    "ess_step_scaling",
    "uaq_scale",
    "noise_schedule",
    "noise_sigma_start",
    "rollouts_in_flight",
    "router_replay",
    "age",
    "served",
)
TASK = (
    "name",
    "trainer",
    "age",
    "evaluations",
    "draws",
    "starts",
    "numbers",
    "digits",
    "quotient",
    "countdown",
    "word_problems",
    "told",
    "accuracy",
    "direct",
    "outliers",
    "lora_rank",
    "hidden_size",
    "num_hidden_layers",
    "num_experts",
    "served",
)  # fields that are not the trainer's
COMMON = {
    "num_generations": 8,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    # Corrections may ask for other values: cells differ in their samples and weights alone.
    "scale_rewards": "group",
    "loss_type": "dapo",
}


WORDS = 112  # tokens of the longest solution in words
TOLD = 84  # tokens of the words in which a sum is told, at most
CANVAS = 8  # tokens that the masked diffusion model writes at once
SHAPES = ((128, 2), (512, 6), (1024, 8))  # channels and layers: 0.5M, 20M and 110M parameters


@dataclass(frozen=True)
class Cell:
    """
    One setting, with one seed. Fields that are not described are those of [`QuantGRPOConfig`].

    Attributes:
        digits (`int`): Of the longest operand; a solution has about 11 tokens for each.
        quotient (`int`): Of the longest division by repeated subtraction, 40 to 50 tokens for each; 0 asks sums and
            differences.
        countdown (`int`): How many numbers are given to search an expression of, 3 or 4, up to about 50 tokens for
            each; 0 asks for none.
        word_problems (`str` or `None`): The dataset whose first questions it asks. The model has learned their
            solutions by heart, and is judged by the same ones.
        told (`int`): Of a story, which tells that many sums in words that are drawn, about 80 tokens for each;
            0 tells none. Each of its seeds begins with one of `starts`.
        accuracy (`float`): How often the model is right when training starts, at temperature 1.
        direct (`float`): How often it gives the answer at once, without the steps, when training starts.
        outliers (`float`): How much larger some channels of its activations are (`outliers.py`); a power of two.
        lora_rank (`int`): Of the adapter that is trained; 0 trains all weights.
        hidden_size (`int`): Channels of the model, a multiple of 128.
        num_hidden_layers (`int`): Layers of the model.
        num_experts (`int`): Of each layer of a mixture, of which a token goes to 2; 0 has a dense model.
        trainer (`str`): `"grpo"`, `"rloo"`, `"ppo"`, `"distillation"` or `"diffusion"`. Distillation teaches a copy of
            the model whose weights were disturbed, with the model as its teacher. Diffusion starts from the model of
            `examples/build_masked_model.py` and asks its additions.
        age (`int` or `None`): How many updates old the samples of an update are, which GRPO's asynchronous trainer
            samples (`pace.py`). `None` is the synchronous trainer.
        evaluations (`int`): How often the policy is judged on the way, the last time at the end.
        draws (`int`): Completions of each held-out problem that judge the policy at its end; 0 leaves that out.
        starts (`int`): How many models its seeds start from in turn: stored ones (`starts.py`), or where sums are told,
            models taught with their numbers as seeds. 0 has one taught for all seeds.
        numbers (`str`): Of those `starts`, with spaces between, where they are not 0, 1, 2 and so on.
        served (`str`): Precisions, with spaces between, in which the policy is also judged at its end, as it would be
            served; one that trains in another is quantized for that.
    """

    name: str
    rollout_precision: str | None = None
    train_precision: str | None = None
    is_correction: str | None = None
    uaq_scale: float | None = None
    noise_schedule: str | None = None
    is_cap: float | None = None
    importance_sampling_level: str = "token"
    ess_step_scaling: bool = False
    noise_sigma_start: float = 1e-2
    rollouts_in_flight: float = 1.0
    router_replay: bool | None = None
    learning_rate: float = 4e-4
    optim: str = "adamw_torch"
    num_iterations: int = 1
    max_steps: int = 300
    digits: int = 3
    quotient: int = 0
    countdown: int = 0
    word_problems: str | None = None
    told: int = 0
    accuracy: float = 0.33
    direct: float = 0.0
    outliers: float = 1.0
    lora_rank: int = 0
    hidden_size: int = SHAPES[0][0]
    num_hidden_layers: int = SHAPES[0][1]
    num_experts: int = 0
    served: str = ""
    use_vllm: bool = False
    trainer: str = "grpo"
    age: int | None = None
    evaluations: int = 6
    draws: int = 0
    starts: int = 0
    numbers: str = ""
    per_device_train_batch_size: int = 128
    seed: int = 0

    @property
    def max_completion_length(self) -> int:
        """Tokens of the longest solution, rounded up to a multiple of 8; of the canvas, where one is denoised."""
        if self.trainer == "diffusion":
            return CANVAS
        if self.word_problems:
            return WORDS
        tokens = 52 * self.countdown or 11 * self.digits + 8
        tokens = (tokens + TOLD) * self.told or tokens
        if self.quotient:  # of the largest numbers; `####` is one token, and <eos> follows
            tokens = len(Division(99 * self.quotient + 98, 99).solution.replace("####", "#")) + 1
        return -(-tokens // 8) * 8

    @property
    def number(self) -> int:
        """Of the start that its seed has."""
        numbers = self.numbers.split() or range(self.starts)
        return int(numbers[self.seed % self.starts])

    @property
    def start(self) -> str:
        """Name of the model that its seed starts from, of those that the seeds have in turn."""
        kind = "mixture-" if self.num_experts else f"told-{self.told}-" if self.told else ""
        return f"{kind}{self.number}"

    @property
    def model(self) -> str:
        """Name of the model that it starts from, which all its seeds share if there are no `starts`."""
        return self.taught + (f"-outliers-{self.outliers:g}" if self.outliers != 1 else "")

    @property
    def taught(self) -> str:
        """Name of that model before it has outliers."""
        shape = f"-{self.hidden_size}x{self.num_hidden_layers}"
        shape = shape if (self.hidden_size, self.num_hidden_layers) != SHAPES[0] else ""
        if self.starts:
            return f"start-{self.start}{shape}"
        if self.trainer == "diffusion":
            return "masked"
        task = f"quotient-{self.quotient}" if self.quotient else f"{self.digits}-digits"
        task = f"countdown-{self.countdown}" if self.countdown else task
        task = self.word_problems.replace("/", "-") if self.word_problems else task
        return (
            f"{task}-{self.accuracy:g}"
            + (f"-direct-{self.direct:g}" if self.direct else "")
            + shape
            + (f"-{self.num_experts}-experts" if self.num_experts else "")
        )

    def arguments(self) -> dict:
        """Of the trainer's config, which takes those of its fields."""
        own = {name: value for name, value in asdict(self).items() if name not in TASK}
        if self.trainer == "ppo":
            own["scale_rewards"] = "none"  # its critic stands in for the group
        if self.trainer == "diffusion":
            own |= {"block_length": CANVAS, "prompt_mask_probability": 0.0}  # a mask on so short a prompt hides a digit
        return COMMON | own | {"max_completion_length": self.max_completion_length}

    def settings(self) -> dict:
        """All that the run depends on."""
        model = {"model": self.model}
        if self.starts:  # the seed says which of those
            model["model"] = "taught in turn" if self.told else "stored"
        task = {name: getattr(self, name) for name in TASK if self.numbers or name != "numbers"}  # older runs have none
        return task | model | self.arguments()


@dataclass(frozen=True)
class Question:
    """
    Attributes:
        asks (`str`): What the table answers.
        cells (`tuple[Cell, ...]`): Its rows.
        panels (`tuple[str, ...]`): Titles of the report's panels that its figure draws; without them it has no figure.
        metrics (`dict[str, str]`): Further columns of its table -> metric.
        by_regime (`bool`): Whether a panel draws all precisions of a regime, and not one precision beside full
            precision.
        compared (`dict[str, tuple[tuple[str, str], ...]]`): Comparisons by family, each of a cell with another one, or
            of sums of cells, seed by seed (`paired.py`).
        ratios (`dict[str, str]`): Label -> metric, whose means over a run are compared so too, as ratios.
    """

    asks: str
    cells: tuple[Cell, ...]
    panels: tuple[str, ...] = ("Held-out reward", "Reward")
    metrics: dict[str, str] | None = None
    by_regime: bool = False
    compared: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    ratios: dict[str, str] = field(default_factory=dict)
