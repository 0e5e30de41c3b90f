"""The checks of [`before_loading`] on the data, the rewards and the turns of a conversation."""

from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from torch.nn import Module
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedConfig, PreTrainedModel
from trl.chat_template_utils import add_response_schema, supports_tool_calling

from ..rollout.tokenizer import check_tokenizer
from ..storage.layout import misread_experts
from ..storage.named import check_named
from ..tasks.data import check_prompts
from ..tasks.rewards import REWARDS, check_reward, check_truths
from .given import read_processing_class
from .values import is_of


def check_data(args, train_dataset, eval_dataset, environments=None) -> None:
    """
    Raises `ValueError` for data that the trainer cannot read, or with too few prompts for one generation. With
    `environments`, prompts may come from these.
    """
    if train_dataset is None and environments is None:
        raise ValueError("`train_dataset` is required unless an `environment_factory` is provided.")
    if train_dataset is not None:
        _check_trained_on(args, train_dataset, environments)
    if eval_dataset is None and args.eval_strategy != "no":
        raise ValueError(f"`eval_strategy`={args.eval_strategy.value!r} needs an `eval_dataset`, and there is none.")
    if eval_dataset is not None:
        check_evaluated(args, eval_dataset, environments)


def _check_trained_on(args, train_dataset, environments) -> None:
    if not isinstance(train_dataset, Dataset | IterableDataset):
        split = "; take one of its splits" if isinstance(train_dataset, dict) else ""
        raise ValueError(
            f"`train_dataset` is a {type(train_dataset).__name__}{split}. It must be a `datasets.Dataset` or "
            "`datasets.IterableDataset`."
        )
    _check_rows("train_dataset", args, train_dataset, environments)
    prompts = args.generation_batch_size // args.num_generations
    reads_again = args.is_asynchronous  # from the beginning, also inside of a generation
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts and not reads_again:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} prompts, fewer than one generation takes, {prompts} "
            f"(`generation_batch_size`={args.generation_batch_size} / `num_generations`={args.num_generations}): "
            "nothing would be trained. Lower `generation_batch_size`, or add prompts."
        )
    if isinstance(train_dataset, IterableDataset) and args.max_steps <= 0:
        raise ValueError(f"`max_steps`={args.max_steps}, but a stream has no length: set the number of steps.")


def check_evaluated(args, eval_dataset, environments=None) -> None:
    """Raises `ValueError` for one or several datasets that the trainer cannot evaluate on."""
    if eval_dataset == {}:
        raise ValueError("`eval_dataset`={} has no dataset.")
    for name, dataset in evaluated(eval_dataset).items():
        if not isinstance(dataset, TorchDataset | Dataset | IterableDataset):
            raise ValueError(
                f"`{name}` is a {type(dataset).__name__}. It must be a `datasets.Dataset` or a dict of them."
            )
        if isinstance(dataset, Dataset | IterableDataset):
            _check_rows(name, args, dataset, environments)


def _check_rows(name: str, args, dataset: Dataset | IterableDataset, environments) -> None:
    # An asynchronous trainer dispatches samples, and not the rows of its dataset
    dispatched = args.accelerator_config.dispatch_batches and not args.is_asynchronous
    if isinstance(dataset, IterableDataset) and dispatched:
        raise ValueError(
            "Iterable datasets require `dispatch_batches=False`, but `accelerator_config` sets it to True."
        )
    if environments is None:
        check_prompts(name, dataset)
    elif isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError(f"`{name}` is empty: it must have at least one row.")


def evaluated(eval_dataset) -> dict:
    """Returns the evaluation datasets, one or a dict of them, by their names in messages."""
    if isinstance(eval_dataset, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


def check_tokenization(config, model, args, processing_class, train_dataset, has_turns: bool = False) -> None:
    """
    Checks the given tokenizer; if none is given and the data has conversations, the one that TRL loads. Tokenizers of
    runs without conversations are checked when the engine is built. `has_turns` says whether there are tools or
    environments.

    Raises:
        `ValueError`: The tokenizer does not fit the model, or has no template for the conversations of the data or for
            the calls of tools.
    """
    talks = has_turns or (isinstance(train_dataset, Dataset) and isinstance(train_dataset[0].get("prompt"), list))
    if processing_class is None and talks and isinstance(model, str):
        processing_class = read_processing_class(model, args)
    if processing_class is None:
        return
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    check_tokenizer(tokenizer, config.get_text_config().vocab_size)
    template = getattr(processing_class, "chat_template", None) or tokenizer.chat_template
    if template is None and talks:
        raise ValueError(
            "`train_dataset` has conversations, but the tokenizer has no chat template to format them. Set "
            "`tokenizer.chat_template`, or use prompts that are plain text."
        )
    if has_turns and not supports_tool_calling(processing_class):
        raise ValueError(
            "The chat template shows the model no call of a tool, or no result of one: with `tools` or an "
            "`environment_factory` it must render both. Use a model or a template that does."
        )
    if has_turns and all(getattr(tokenizer, name, None) is None for name in ("response_template", "response_schema")):
        add_response_schema(processing_class)  # as TRL does later; it raises where it does not know the template


def check_rewards(args, reward_funcs, train_dataset, eval_dataset=None, more_columns: bool = False) -> None:
    """
    Raises `ValueError` for missing rewards, for rewards whose columns or answers the data lacks, and for weights that
    are not one finite number for each reward. With `more_columns`, a `rollout_func` may add columns.
    """
    if reward_funcs is None or reward_funcs == []:
        raise ValueError(
            "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose environment defines a "
            f"`get_reward` method. `reward_funcs`={reward_funcs!r} must be a function, a model or a list of them."
        )
    columns = None if more_columns else train_dataset.column_names
    count = len(reward_funcs) if isinstance(reward_funcs, list) else 1
    weights = args.reward_weights
    is_list = isinstance(weights, list | tuple)
    if weights is not None and not (is_list and len(weights) == count and all(is_of(float, one) for one in weights)):
        numbers = "1 finite number, for the 1 reward" if count == 1 else f"{count} finite numbers, one for each reward"
        raise ValueError(f"`reward_weights`={weights!r} must be a list of {numbers}.")
    for reward in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if isinstance(reward, str | Module) or reward is None:
            continue
        check_reward(reward)
        for name, dataset in evaluated(eval_dataset).items():
            if not more_columns and isinstance(dataset, Dataset | IterableDataset):
                check_reward(reward, dataset.column_names, name, args.is_asynchronous)
        if columns is not None:
            check_reward(reward, columns, is_asynchronous=args.is_asynchronous)
            if args.remove_unused_columns and not args.is_asynchronous:  # whose samplers read whole rows
                _check_reward_of_kept(reward, columns)
            if isinstance(train_dataset, Dataset) and train_dataset.format["type"] != "custom":
                check_truths(reward, train_dataset.with_format(None))


def check_reward_models(args, reward_funcs) -> None:
    """Raises `ValueError` for a reward that is a model, or the name of one, which the trainer cannot take or load."""
    for reward in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if not isinstance(reward, str | Module):
            continue
        if isinstance(reward, str) and reward in REWARDS and not Path(reward).is_dir():
            raise ValueError(
                f"`reward_funcs`={reward!r} is the command line's name of a reward, which TRL would load as a model. "
                f"Pass the function `trl_quant.tasks.{REWARDS[reward].__name__}`."
            )
        if args.is_asynchronous:
            raise ValueError("`reward_funcs` has a reward model, and asynchronous samplers call functions alone.")
        if isinstance(reward, str):
            check_named("reward_funcs", reward)
        _check_experts_of(reward)


def _check_experts_of(reward: str | Module) -> None:
    """Raises `ValueError` for a reward model, or its name, whose stored experts transformers misreads."""
    if isinstance(reward, Module):
        config = reward.config.to_dict() if isinstance(reward, PreTrainedModel) else {}
    else:
        try:
            config, _ = PreTrainedConfig.get_config_dict(reward)
        except OSError:  # an adapter has none, and what is damaged is refused by the load itself
            return
    if (found := misread_experts(config)) is not None:
        name = reward if isinstance(reward, str) else reward.config.name_or_path
        raise ValueError(
            f"`reward_funcs`={name!r} is a mixture of experts stored in {found!r}. transformers does not read the "
            "global scales of its experts, and would compute with wrong ones. Use its 16-bit checkpoint."
        )


def _check_reward_of_kept(reward, columns) -> None:
    """Raises `ValueError` for a reward that reads columns that `remove_unused_columns` removes."""
    kept = [name for name in columns if name in ("prompt", "image", "images")]  # as TRL keeps them
    try:
        check_reward(reward, kept)
    except ValueError as error:
        raise ValueError(f"`remove_unused_columns`=True removes a column that a reward reads. {error}") from error


def check_texts(train_dataset, eval_dataset) -> None:
    """Raises `ValueError` for data with images, which a critic does not read."""
    for name, dataset in {"train_dataset": train_dataset, **evaluated(eval_dataset)}.items():
        if holds_images(dataset):
            raise ValueError(
                f"`{name}` has images, in a column or a prompt, and the critic reads only text. Remove them."
            )


def check_dynamic_sampling(args, tools=None, rollout_func=None, environment_factory=None) -> None:
    """Raises `ValueError` if dynamic sampling cannot sample the completions of further groups."""
    if not args.dynamic_sampling_rounds:
        return
    option = f"`dynamic_sampling_rounds`={args.dynamic_sampling_rounds}"
    given = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
    names = [f"`{name}`" for name, value in given.items() if value]
    if names:
        raise ValueError(
            f"{option} samples single turns again, and cannot be combined with {' and '.join(names)}, whose turns have "
            "a state of their own. Set it to 0."
        )


def check_reads_ahead(args, train_dataset) -> None:
    """Raises `ValueError` if the pool of rollouts cannot read the data ahead."""
    options = [
        name for name, off in (("dynamic_sampling_rounds", 0), ("rollouts_in_flight", 1)) if getattr(args, name) != off
    ]
    if options and isinstance(train_dataset, IterableDataset):
        given = " and ".join(f"`{name}`={getattr(args, name)}" for name in options)
        raise ValueError(
            f"{given} reads prompts ahead of TRL, which a stream cannot give twice. Use a `datasets.Dataset`, or leave "
            "it at its default."
        )


def holds_images(dataset) -> bool:
    """Whether a dataset has a column of images, or one in its first prompt. Streams are not read."""
    if {"image", "images"} & set(getattr(dataset, "column_names", None) or ()):
        return True
    return isinstance(dataset, Dataset) and len(dataset) > 0 and bool(images_of(dataset[0].get("prompt", "")))


def images_of(prompt: str | list[dict]) -> list | None:
    """Returns the images in a conversation, `None` for a place that awaits one; `None` if it has no images."""
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part.get("image") for part in parts if part.get("type") == "image"] or None


def check_turns(args, tools, environment_factory) -> None:
    """
    Raises `ValueError` for tools without a `max_completion_length`, at which TRL ends the turns of a completion. With
    our vLLM engines, also raises it where TRL makes several processes take each turn together, because each process may
    need another number of turns.
    """
    if not tools and environment_factory is None:
        return
    given = "`tools`" if tools else "`environment_factory`"
    if args.max_completion_length is None:
        raise ValueError(
            f"{given} with `max_completion_length`=None: TRL ends the turns of a completion at that length. Set it."
        )
    if not args.use_vllm or args.rollout_precision is None or args.is_asynchronous:
        return
    why = (
        "TRL gathers the prompts of every turn from {} and cuts the completions into parts of equal size. If they call "
        "tools a different number of times, they wait for each other for ever, or get each other's completions."
    )
    processes = PartialState().num_processes
    if args.vllm_mode == "server" and processes > 1:
        raise ValueError(
            f"{given} with `vllm_mode`='server' on {processes} processes: {why.format('all processes')} Use "
            "`vllm_mode='colocate'`, or one process."
        )
    if args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise ValueError(
            f"{given} with `vllm_tensor_parallel_size`={args.vllm_tensor_parallel_size}: "
            f"{why.format('the processes of an engine')} Use `vllm_tensor_parallel_size=1`."
        )
