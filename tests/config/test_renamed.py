"""Names that TRL and transformers gave up, and words that YAML turns into True and False: refused by their names."""

import inspect
import re
from dataclasses import fields
from enum import Enum
from typing import get_args, get_type_hints

import pytest
from tiny import tiny_model
from trl import ModelConfig

from trl_quant.cli import main
from trl_quant.cli.options import about_unknown
from trl_quant.config.values import TRUE_OR_FALSE_TOO
from trl_quant.renamed import RENAMED
from trl_quant.trainers.launch import TRAINERS, TrainArguments


CONFIGS = {name: trainer.config_class for name, trainer in TRAINERS.items()}
MINIMAL = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": []}


def arguments_of(trainer_class) -> set[str]:
    """The arguments of a trainer's constructor and of those that it calls."""
    made = (kind.__init__ for kind in trainer_class.__mro__ if "__init__" in vars(kind))
    return {name for function in made for name in inspect.signature(function).parameters}


def test_the_table_tells_todays_names():
    """An earlier name is no field of any config, or it would never be told; and what is told instead is one."""
    names = {f.name for config in (*CONFIGS.values(), TrainArguments, ModelConfig) for f in fields(config)}
    arguments = set.union(*map(arguments_of, TRAINERS.values()))
    assert not names & RENAMED.keys() and not arguments & RENAMED.keys()
    for earlier, instead in RENAMED.items():
        if not instead[0].isupper():
            told = set(re.findall("`(\\w+)`", instead))
            assert told and told <= names | arguments | {"prompt"}, (earlier, instead)


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_constructor_tells_the_new_name(kind):
    trainer_class, config, policy = TRAINERS[kind], CONFIGS[kind], tiny_model()
    for earlier in RENAMED:
        for call in (
            lambda name=earlier: config(**MINIMAL, **{name: 1}),
            lambda name=earlier: trainer_class(model=policy, **{name: 1}),
        ):
            with pytest.raises(ValueError, match=f"{config.__name__[:5]}.*gave up the name `{earlier}`"):
                call()
    with pytest.raises(TypeError, match="bogus"):  # Python names any other
        config(**MINIMAL, bogus=1)
    options = [f.name for f in fields(config) if f.name.endswith("model_init_kwargs")]
    assert options
    for name in options:
        with pytest.raises(ValueError, match=f"`{name}`: .*`torch_dtype`. Use `dtype`"):
            config(**MINIMAL, **{name: {"torch_dtype": "bfloat16"}})


def test_the_command_line_and_a_file_tell_the_new_name(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    for trainer in TRAINERS:
        for earlier in RENAMED:
            assert f"`{earlier}`" in about_unknown([f"--{earlier}"], trainer)
            assert f"`{earlier}`" in about_unknown([f"--{earlier.replace('_', '-')}=1"], trainer)
    for earlier in ("torch_dtype", "max_prompt_length"):
        file.write_text(f"model_name_or_path: m\n{earlier}: 512\n")
        for argv in ([f"--{earlier}", "512"], ["--config", str(file)]):
            with pytest.raises(SystemExit, match="2"):
                main(["train", "--model_name_or_path", "m", *argv])
            assert f"gave up the name `{earlier}`" in capsys.readouterr().err


def words_of(hint) -> list[str]:
    kinds = get_args(hint) or (hint,)
    found = [word.value for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for word in kind]
    return found


@pytest.mark.parametrize("kind", TRAINERS)
def test_true_and_false_are_no_words(kind):
    """In each field that takes a text or a word: False is the word "no" where there is one, and nothing elsewhere."""
    config, tried = CONFIGS[kind], {"words": 0, "texts": 0}
    hints = get_type_hints(config)
    for field in fields(config):
        hint = hints[field.name]
        kinds, words = get_args(hint) or (hint,), words_of(hint)
        takes = bool in kinds or field.metadata.get("const") is True or field.name in TRUE_OR_FALSE_TOO
        if takes or not (words or str in kinds):
            continue
        for value in (True, False):
            if any(value in get_args(part) for part in kinds):  # `Literal[False]`
                continue
            given = MINIMAL | {field.name: value}
            if value is False and "no" in words:
                tried["words"] += 1
                assert getattr(config(**given), field.name) == "no"
                continue
            tried["texts"] += 1
            with pytest.raises(ValueError, match=f"`{field.name}`={value} must be .*YAML reads a bare no"):
                config(**given)
    assert tried["words"] >= 3 and tried["texts"] > 20


def test_a_file_may_say_no(tmp_path):
    """The whole way through TRL's parser; and a word of the model's options is refused by its name."""
    from trl_quant.cli.train import parse_args

    file = tmp_path / "run.yaml"
    text = "model_name_or_path: m\nuse_cpu: true\nbf16: false\nreport_to: none\n"
    file.write_text(text + "save_strategy: no\nlogging_strategy: off\n")
    _, args, _ = parse_args(["--config", str(file)])
    assert args.save_strategy == args.logging_strategy == "no"
    for line in ("save_strategy: yes", "attn_implementation: off", "dataset_name: on", "rollout_precision: no"):
        file.write_text(text + line)
        with pytest.raises(ValueError, match=f"`{line.partition(':')[0]}`=(True|False) must be"):
            parse_args(["--config", str(file)])


def test_nothing_else_is_refused():
    """What a config takes today, it takes."""
    for config in CONFIGS.values():
        taken = config(**MINIMAL, save_strategy="no", fsdp=False, model_init_kwargs={"dtype": "bfloat16"})
        assert taken.save_strategy == "no"
