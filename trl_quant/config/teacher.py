"""The checks of a distillation's teacher, before it is loaded: its name, its vocabulary, its precision."""

from transformers import AutoConfig

from ..models.families import number_of_experts
from ..policy.vocabulary import saved_tokenizer, why_not_one_vocabulary
from ..reading import reading
from ..storage.named import check_named


def check_teacher(args, student, teacher, processing_class) -> None:
    """
    Raises `ValueError` for a teacher whose vocabulary is not the student's, that cannot be quantized to
    `teacher_precision`, or that contradicts the arguments.

    Args:
        args ([`QuantDistillationConfig`]): The trainer's arguments.
        student (`PretrainedConfig`): The student's config.
        teacher (`str` or [`~transformers.PreTrainedModel`]): The teacher or its name.
        processing_class: The student's tokenizer or processor; `None` for the one that was saved with the student.
    """
    if teacher is None:
        raise ValueError("`teacher_model`=None: name the model that the student learns from, or pass it.")
    if args.teacher_precision is not None and not isinstance(teacher, str):
        raise ValueError(
            f"`teacher_precision`={args.teacher_precision!r} quantizes the teacher while it loads, and `teacher_model` "
            "is loaded already. Pass its name or directory."
        )
    for name in ("teacher_model_revision", "teacher_model_init_kwargs"):
        if getattr(args, name) and not isinstance(teacher, str):
            raise ValueError(
                f"`{name}`={getattr(args, name)!r} acts only while a teacher loads, and `teacher_model` is loaded "
                "already. Pass its name or directory, or leave the field unset."
            )
    named, name = args.teacher_model_name_or_path, _name_of(teacher)
    if named is not None and named != name:
        raise ValueError(
            f"`teacher_model_name_or_path`={named!r}, but `teacher_model` is {name or 'in memory'!r}. "
            "Leave the field unset, or name the same teacher."
        )
    config = read_teacher(args, teacher)
    _check_vocabulary(args, student, config, processing_class)
    experts = number_of_experts(config.to_dict())
    if args.teacher_precision is not None and experts > 1:
        raise ValueError(
            f"`teacher_precision`={args.teacher_precision!r}, but the teacher is a mixture of {experts} experts, which "
            "stay in 16 bits here. Leave it unset."
        )


def read_teacher(args, teacher):
    """Returns the config of a teacher. For a name, it is read as TRL will read it."""
    if not isinstance(teacher, str):
        return teacher.config
    revision = (args.teacher_model_init_kwargs or {}).get("revision", args.teacher_model_revision)
    options = {} if revision is None else {"revision": revision}
    check_named("teacher_model", teacher, revision)
    try:
        with reading(teacher):
            return AutoConfig.from_pretrained(teacher, trust_remote_code=args.trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"`teacher_model`={teacher!r} cannot be read: {error}") from error


def _check_vocabulary(args, student, teacher, processing_class) -> None:
    """Refuses a teacher with other tokens than the student. Rows that are no tokens of either are cut later."""
    rows, other = (config.get_text_config().vocab_size for config in (student, teacher))
    if rows == other:
        return
    tokenizer = saved_tokenizer(student, args.trust_remote_code) if processing_class is None else processing_class
    tokenizers = {
        "student": getattr(tokenizer, "tokenizer", tokenizer),
        "teacher": saved_tokenizer(teacher, args.trust_remote_code),
    }
    known = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer is not None}
    fault = why_not_one_vocabulary(min(rows, other), known)
    if fault is not None:
        raise ValueError(
            f"The student's vocabulary has {rows} tokens and the teacher's {other}. Distillation compares their "
            "distributions token by token: use a teacher with the student's tokenizer. Only rows that are no tokens "
            f"are cut, and {fault}."
        )
    if rows > other and args.use_vllm:
        raise ValueError(
            f"The student's embedding has {rows} rows and the teacher's {other}. The student's other rows are padding "
            f"and would be cut, but `use_vllm`={args.use_vllm!r} starts vLLM on a checkpoint that has them. Cut and "
            f"save the student first (`model.resize_token_embeddings({other})`), or sample with `use_vllm=False`."
        )


def _name_of(teacher) -> str:
    """Returns the name that a teacher is or was loaded by."""
    return teacher if isinstance(teacher, str) else getattr(teacher.config, "name_or_path", None) or ""
