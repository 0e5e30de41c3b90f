"""Rules of a distillation's teacher: its name, its vocabulary, its precision."""

from ...models.families import number_of_experts
from ...policy.vocabulary import saved_tokenizer, why_not_one_vocabulary
from ...storage.layout import misread_experts
from ..given import Given, name_of
from .rule import Rule


def _given_formats(run: Given) -> str | None:
    """Returns the argument of `from_pretrained` that sets the teacher's format."""
    given = run.args.teacher_model_init_kwargs or {}
    return next((name for name in ("quantization_config", "config") if name in given), None)


def _rows(run: Given) -> tuple[int, int]:
    """Returns the rows of the student's and of the teacher's embedding."""
    return run.config.get_text_config().vocab_size, run.teacher_config.get_text_config().vocab_size


def _other_tokens(run: Given) -> tuple | None:
    """Returns the rows of two embeddings of different vocabularies. Rows that are no tokens of either are cut later."""
    rows, other = _rows(run)
    if rows == other:
        return None
    trust = run.args.trust_remote_code
    tokenizer = saved_tokenizer(run.config, trust) if run.processing_class is None else run.processing_class
    tokenizers = {
        "student": getattr(tokenizer, "tokenizer", tokenizer),
        "teacher": saved_tokenizer(run.teacher_config, trust),
    }
    known = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer is not None}
    fault = why_not_one_vocabulary(min(rows, other), known)
    return None if fault is None else (rows, other, fault)


def _cut_rows(run: Given) -> tuple[int, int] | None:
    """Returns the rows of the two embeddings, where vLLM starts on rows that the student loses."""
    rows, other = _rows(run)
    return (rows, other) if rows > other and run.args.use_vllm else None


def _named_twice(run: Given) -> str | None:
    """Returns the name of another teacher than the config names."""
    named, name = run.args.teacher_model_name_or_path, name_of(run.teacher)
    return (name or "in memory") if named is not None and named != name else None


def _experts(run: Given) -> int:
    """Returns the number of the teacher's experts, where it is quantized; 0 for a dense teacher."""
    experts = 0 if run.args.teacher_precision is None else number_of_experts(run.teacher_config.to_dict())
    return experts if experts > 1 else 0


def _misread_experts(run: Given) -> str | None:
    """Returns [`~storage.layout.misread_experts`] of the teacher; `None` if there is no teacher."""
    return None if run.teacher is None else misread_experts(run.teacher_config.to_dict())


RULES = (
    Rule(
        ("teacher_precision", "teacher_model_init_kwargs"),
        when=lambda run: run.args.teacher_precision is not None and _given_formats(run),
        message="`teacher_precision`={args.teacher_precision!r} and {found!r} in `teacher_model_init_kwargs` both "
        "set the teacher's format. Unset one of the two.",
    ),
    Rule(
        ("teacher_precision",),
        when=lambda run: run.teacher is None,
        message="`teacher_model`=None: name the model that the student learns from, or pass it.",
        needs="model",
    ),
    Rule(
        ("teacher_precision",),
        when=lambda run: run.args.teacher_precision is not None and not isinstance(run.teacher, str),
        message="`teacher_precision`={args.teacher_precision!r} quantizes the teacher while it loads, and "
        "`teacher_model` is loaded already. Pass its name or directory.",
        needs="model",
    ),
    *(
        Rule(
            ("teacher_precision", name),
            when=lambda run, name=name: getattr(run.args, name) and not isinstance(run.teacher, str),
            message=f"`{name}`={{args.{name}!r}} acts only while a teacher loads, and `teacher_model` is loaded "
            "already. Pass its name or directory, or leave the field unset.",
            needs="model",
        )
        for name in ("teacher_model_revision", "teacher_model_init_kwargs")
    ),
    Rule(
        ("teacher_model_name_or_path",),
        when=_named_twice,
        message="`teacher_model_name_or_path`={args.teacher_model_name_or_path!r}, but `teacher_model` is {found!r}. "
        "Leave the field unset, or name the same teacher.",
        needs="model",
    ),
    Rule(
        ("teacher_precision",),
        when=_other_tokens,
        message="The student's vocabulary has {found[0]} tokens and the teacher's {found[1]}. Distillation compares "
        "their distributions token by token: use a teacher with the student's tokenizer. Only rows that are no tokens "
        "are cut, and {found[2]}.",
        needs="model",
    ),
    Rule(
        ("teacher_precision", "use_vllm"),
        when=_cut_rows,
        message="The student's embedding has {found[0]} rows and the teacher's {found[1]}. The student's other rows "
        "are padding and would be cut, but `use_vllm`={args.use_vllm!r} starts vLLM on a checkpoint that has them. Cut "
        "and save the student first (`model.resize_token_embeddings({found[1]})`), or sample with `use_vllm=False`.",
        needs="model",
    ),
    Rule(
        ("teacher_precision",),
        when=_experts,
        message="`teacher_precision`={args.teacher_precision!r}, but the teacher is a mixture of {found} experts, "
        "which stay in 16 bits here. Leave it unset.",
        needs="model",
    ),
    Rule(
        ("teacher_precision",),
        when=_misread_experts,
        message="The teacher is a mixture of experts stored in {found!r}. transformers does not read the global scales "
        "of its experts, and would compute with wrong ones. Use its 16-bit checkpoint.",
        needs="model",
    ),
)
