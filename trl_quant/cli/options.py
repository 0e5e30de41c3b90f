"""The options of all commands, known without torch, transformers and TRL, which take seconds to load.

So `--help` and a wrong flag are answered at once. There are two sources:

- `options.json` holds what tables and dataclasses of this package say: the values that an option may have, and the
  options of `train` that are ours. `python -m trl_quant.cli.write_options` writes it, and a test holds it up to date.
- The sources of the installed TRL and transformers are read, not run, for the fields of their dataclasses.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


PROG = "trl-quant train"
USAGE = "%(prog)s --model_name_or_path MODEL [--config FILE.yaml] [options]"
STORED = Path(__file__).with_name("options.json")
# Heading in the help of `train` -> package, then file and class of the fields below it, of which the later ones win
HOST_CLASSES = {
    "ModelConfig of TRL": ("trl", (("trainer/model_config.py", "ModelConfig"),)),
    "GRPOConfig of TRL": (
        "trl",
        (("trainer/base_config.py", "_BaseConfig"), ("trainer/grpo_config.py", "GRPOConfig")),
    ),
    "TrainingArguments of transformers": ("transformers", (("training_args.py", "TrainingArguments"),)),
}
ENUM_FILES = ("training_args.py", "trainer_utils.py")  # of transformers: what some of these fields may be


class Option(NamedTuple):
    """
    An option of `train`, as argparse shows it.

    Attributes:
        nargs (`str` or `None`): `"?"` for a flag whose value may be left out, `"+"` for a list.
        default (`bool`, `int`, `float`, `str`, `list` or `None`): argparse's `SUPPRESS` where it is not known.
        help (`str` or `None`): What it does.
        choices (`list` or `None`): Values that it may have; `None` for any.
    """

    nargs: str | None
    default: bool | int | float | str | list | None
    help: str | None
    choices: list | None


@cache
def stored() -> dict:
    """The contents of `options.json`."""
    return json.loads(STORED.read_text("utf-8"))


def choices(option: str) -> list[str]:
    """The values that an option may have, other than one of `train`."""
    return stored()["choices"][option]


def sampling() -> dict[str, float]:
    """The defaults of `eval` where it samples answers."""
    return stored()["sampling"]


# train


def check_train(argv: list[str], prog: str = PROG, usage: str = USAGE, defaults: dict | None = None) -> None:
    """
    Ends the process where `argv` asks for help, names an unknown option, or leaves out a value.

    Args:
        argv (`list[str]`): The command line.
        prog (`str`, *optional*): Name of the program.
        usage (`str`, *optional*): Its usage, for argparse.
        defaults (`dict`, *optional*): Option -> default in place of the usual one.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description="GRPO with quantized rollouts. The options may also come from a YAML file, `--config`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", help=argparse.SUPPRESS)
    for title, group in train_options().items():
        section = parser.add_argument_group(title)
        for name, option in group.items():
            _add(section, name, option)
    parser.set_defaults(**defaults or {})
    _, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(about_unknown(unknown))


def about_unknown(arguments: list[str]) -> str:
    """Names unknown arguments of `train`, and an option that looks like the first of them."""
    known = [f"--{name}" for group in train_options().values() for name in group]
    close = get_close_matches(arguments[0], known, n=1)
    return f"unknown arguments: {' '.join(arguments)}" + (f" (did you mean {close[0]}?)" if close else "")


def _add(parser: argparse.ArgumentParser, name: str, option: Option) -> None:
    """Adds an option, with the spellings that transformers' parser takes: hyphens, and `--no_` before what is on."""
    dashed = name.replace("_", "-")
    metavar = f"{{{','.join(map(str, option.choices))}}}" if option.choices else None
    flags = dict.fromkeys((f"--{name}", f"--{dashed}"))
    parser.add_argument(*flags, nargs=option.nargs, default=option.default, help=option.help, metavar=metavar)
    if option.default is True and option.nargs == "?":
        flags = dict.fromkeys((f"--no_{name}", f"--no-{dashed}"))
        parser.add_argument(*flags, action="store_false", dest=name, default=False, help=option.help)


def train_options() -> dict[str, dict[str, Option]]:
    """Heading -> name -> option: first ours, then those that TRL and transformers define."""
    ours = {
        title: {name: Option(**option) for name, option in group.items()} for title, group in stored()["train"].items()
    }
    seen = {name for group in ours.values() for name in group}
    hosts = {
        title: dict(field for file, name in classes for field in _fields(package, file, name))
        for title, (package, classes) in HOST_CLASSES.items()
    }
    model, trl, transformers = hosts.values()
    inherited = {name: trl.pop(name, option) for name, option in transformers.items()}
    for title, group in zip(hosts, (model, trl, inherited), strict=True):
        ours[title] = {name: option for name, option in group.items() if name not in seen}
        seen |= group.keys()
    return ours


def _classes(package: str, file: str) -> dict[str, ast.ClassDef]:
    """Name -> source of the classes in a file of an installed package."""
    source = Path(find_spec(package).origin).parent / file
    return {node.name: node for node in ast.parse(source.read_text("utf-8")).body if isinstance(node, ast.ClassDef)}


def _fields(package: str, file: str, name: str) -> Iterator[tuple[str, Option]]:
    """Name and option of each field of a dataclass, from its source."""
    for statement in _classes(package, file)[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call):
            yield statement.target.id, _option(ast.unparse(statement.annotation), statement.value)


def _option(hint: str, field: ast.Call) -> Option:
    """The option that transformers' parser makes of a field with a type hint, `field(default=..., metadata=...)`."""
    given = {keyword.arg: keyword.value for keyword in field.keywords}
    metadata = given.get("metadata", ast.Dict([], []))
    texts = {key.value: _value(value, None) for key, value in zip(metadata.keys, metadata.values, strict=True)}
    default = _value(given.get("default"), argparse.SUPPRESS)
    kind, nargs = _kind(hint), texts.get("nargs")
    if kind.startswith("list["):
        nargs, default = "+", [] if "default_factory" in given else None
    elif kind == "bool" or (kind == "bool | None" and isinstance(default, bool)):
        nargs = "?"
    return Option(nargs, default, texts.get("help"), _enums().get(kind, texts.get("choices")))


def _kind(hint: str) -> str:
    """Which type of a union transformers' parser reads."""
    parts = hint.split(" | ")
    if len(parts) == 1 or ("bool" in parts and "None" in parts):
        return hint
    if "None" in parts:
        return parts[0] if parts[1] == "None" else parts[1]
    return parts[0] if parts[1] == "str" else parts[1]


@cache
def _enums() -> dict[str, list[str]]:
    """Name -> values of transformers' enums."""
    classes = {name: node for file in ENUM_FILES for name, node in _classes("transformers", file).items()}
    return {
        name: [member.value.value for member in node.body if isinstance(member, ast.Assign)]
        for name, node in classes.items()
        if any(ast.unparse(base) == "ExplicitEnum" for base in node.bases)
    }


def _value(node: ast.expr | None, otherwise):
    """The value of an expression that consists of literals."""
    try:
        return otherwise if node is None else ast.literal_eval(node)
    except ValueError:
        return otherwise
