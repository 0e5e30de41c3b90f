"""Lists the options of all commands without loading torch, transformers and TRL, which takes seconds.

`--help` and a wrong flag are therefore answered at once. The options come from two places:

- `options.json` holds the allowed values of options, the options of `train` that this package adds, and where TRL
  defines its configs, from our tables and dataclasses. `python -m trl_quant.cli.write_options` writes it, and a test
  fails if it is out of date.
- TRL's and transformers' fields are read from the source files of their dataclasses, which are not executed.
"""

import argparse
import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import yaml

from ..reading import read_json, reading
from ..renamed import earlier_name


PROG = "trl-quant train"
USAGE = "%(prog)s --model_name_or_path MODEL [--config FILE.yaml] [options]"
DEFAULTS = {"lora_dropout": 0.0}  # of `train`, instead of TRL's 0.05, because an engine has no dropout
STORED = Path(__file__).with_name("options.json")
# The options that `--help` explains, of those that a trainer has; it names all others
FIRST = (
    *("model_name_or_path", "dataset_name", "reward_funcs", "output_dir", "rollout_precision", "train_precision"),
    *("use_vllm", "use_peft", "max_steps", "dry_run"),
)
ENUM_FILES = ("training_args.py", "trainer_utils.py")  # of transformers; they hold the enums of allowed values


class Option(NamedTuple):
    """
    An option of `train`, as argparse shows it.

    Attributes:
        nargs (`str` or `None`): `"?"` for a flag whose value may be left out, `"+"` for a list.
        default (`bool`, `int`, `float`, `str`, `list` or `None`): The default; argparse's `SUPPRESS` if unknown.
        help (`str` or `None`): The help text.
        choices (`list` or `None`): The allowed values; `None` for any.
    """

    nargs: str | None
    default: bool | int | float | str | list | None
    help: str | None
    choices: list | None


@cache
def stored() -> dict:
    """Reads `options.json`."""
    return read_json(STORED)


def choices(option: str) -> list[str]:
    """Returns the allowed values of an option of any command except `train`."""
    return stored()["choices"][option]


def sampling() -> dict[str, float]:
    """Returns the sampling defaults of `eval`."""
    return stored()["sampling"]


# train


def trl_configs() -> dict[str, list[list[str]]]:
    """
    Returns value of `--trainer`, the default first -> the file and the name of TRL's config class and of those of its
    base classes that TRL defines, a base class first.
    """
    return stored()["trl_configs"]


def check_train(argv: list[str], prog: str = PROG, usage: str = USAGE, defaults: dict | None = None) -> None:
    """
    Ends the process if `argv` asks for help, names an unknown option, or leaves out a value.

    Args:
        argv (`list[str]`): The command line.
        prog (`str`, *optional*): Name of the program.
        usage (`str`, *optional*): The usage line, for argparse.
        defaults (`dict`, *optional*): Defaults of options that replace the usual ones.
    """
    trainer = chosen_trainer(argv, defaults)
    parser = partial(_parser, prog, usage, trainer, DEFAULTS | (defaults or {}))
    helper = argparse.ArgumentParser(prog, usage, add_help=False, allow_abbrev=False)
    helper.add_argument("-h", "--help", nargs="?", const="")
    topic = helper.parse_known_args(argv)[0].help
    if topic is not None:
        print(_help(topic, trainer, parser))
        helper.exit()
    parser = parser(train_options(trainer))
    _, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(about_unknown(unknown, trainer))


def _parser(prog: str, usage: str, trainer: str, defaults: dict, groups: dict) -> argparse.ArgumentParser:
    """Returns a parser of the options in some groups, heading -> name -> option."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=f"Trains with quantized rollouts ({trainer}). The options may also be in a YAML file, `--config`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        add_help=False,
    )
    parser.add_argument("--config", help=argparse.SUPPRESS)
    for title, group in groups.items():
        section = parser.add_argument_group(title)
        for name, option in group.items():
            _add(section, name, option)
    parser.set_defaults(**defaults)
    return parser


def _help(topic: str, trainer: str, parser: Callable[[dict], argparse.ArgumentParser]) -> str:
    """
    Returns the help on a topic: a word of a group or of an option, or "all". Without a topic it explains the options
    that matter most, and names the others.
    """
    groups = train_options(trainer)
    if topic:
        chosen = {
            title: {name: option for name, option in group.items() if topic in ("all", *title.split()) or topic in name}
            for title, group in groups.items()
        }
        chosen = {title: group for title, group in chosen.items() if group}
        return parser(chosen).format_help() if chosen else f"No group and no option has the word {topic!r}.\n"
    every = {name: option for group in groups.values() for name, option in group.items()}
    first = {name: every[name] for name in FIRST if name in every}
    named = [
        f"{title}:\n{fill(' '.join(f'--{name}' for name in group), 100, initial_indent='  ', subsequent_indent='  ')}\n"
        for title, group in groups.items()
    ]
    told = "`--help WORD` explains the options of a group, or of names with the word; `--help all` explains all.\n"
    return "\n".join([parser({"the options that matter most": first}).format_help(), *named, told])


def chosen_trainer(argv: list[str], defaults: dict | None = None) -> str:
    """
    Returns the `--trainer` of a command line, of its `--config` file, or of `defaults`, before any other option is
    read. Any other value counts as the first trainer here, and is refused later with the other options.
    """
    named = given(argv, "trainer")
    name = named if isinstance(named, str) else (defaults or {}).get("trainer")
    return name if name in [*trl_configs()] else next(iter(trl_configs()))


def with_model(parser: argparse.ArgumentParser, options: list[str]) -> list[str]:
    """Returns options of `train` in which a MODEL that stands before them has its name, `--model_name_or_path`."""
    if not options or options[0].startswith("-"):
        return options
    if any(part.partition("=")[0] == "--model_name_or_path" for part in options):
        parser.error(f"MODEL ({options[0]}) and --model_name_or_path both name the model: leave one of them out")
    return ["--model_name_or_path", *options]


def given(argv: list[str], name: str):
    """
    Returns the value of an option on a command line, or in its `--config` file; `None` if it has none. The value is not
    checked, and a file that cannot be read is refused later.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const=True)
    parser.add_argument("--config", nargs="?")
    found, _ = parser.parse_known_args(argv)
    if getattr(found, name) is not None:
        return getattr(found, name)
    with suppress(OSError, ValueError):
        return read_config(found.config).get(name)
    return None


def read_config(path: str | None) -> dict:
    """Reads the YAML file of `--config`, if any. TRL refuses one that does not hold options."""
    if path is None:
        return {}
    with reading(path, advice="Correct it."):
        found = yaml.safe_load(Path(path).read_text("utf-8"))
    return found if isinstance(found, dict) else {}


def about_unknown(arguments: list[str], trainer: str) -> str:
    """Returns a message that names unknown arguments of `train`, and the option most like the first of them."""
    earlier = earlier_name(arguments[0].partition("=")[0].lstrip("-").replace("-", "_"))
    if earlier is not None:
        return earlier
    known = [f"--{name}" for group in train_options(trainer).values() for name in group]
    close = get_close_matches(arguments[0], known, n=1)
    told = f"unknown arguments: {' '.join(arguments)}" + (f" (did you mean {close[0]}?)" if close else "")
    return told if trainer == next(iter(trl_configs())) else f"{told}, with `--trainer {trainer}`"


def _add(parser: argparse.ArgumentParser, name: str, option: Option) -> None:
    """Adds an option with the spellings that transformers' parser takes: hyphens, and `--no_` for flags that are on."""
    dashed = name.replace("_", "-")
    metavar = f"{{{','.join(map(str, option.choices))}}}" if option.choices else None
    flags = dict.fromkeys((f"--{name}", f"--{dashed}"))
    parser.add_argument(*flags, nargs=option.nargs, default=option.default, help=option.help, metavar=metavar)
    if option.default is True and option.nargs == "?":
        flags = dict.fromkeys((f"--no_{name}", f"--no-{dashed}"))
        parser.add_argument(*flags, action="store_false", dest=name, default=False, help=option.help)


def train_options(trainer: str) -> dict[str, dict[str, Option]]:
    """Returns heading -> name -> option of a trainer: first ours, then TRL's and transformers' own."""
    ours = {
        title: {name: Option(**option) for name, option in group.items()}
        for title, group in stored()["train"][trainer].items()
    }
    seen = {name for group in ours.values() for name in group}
    hosts = {
        title: dict(field for file, name in classes for field in _fields(package, file, name))
        for title, (package, classes) in _host_classes(trainer).items()
    }
    model, trl, transformers = hosts.values()
    model = {name: option for name, option in model.items() if name not in trl}  # of two `dtype`, the config's acts
    inherited = {name: trl.pop(name, option) for name, option in transformers.items()}
    for title, group in zip(hosts, (model, trl, inherited), strict=True):
        ours[title] = {name: option for name, option in group.items() if name not in seen}
        seen |= group.keys()
    return ours


def _host_classes(trainer: str) -> dict[str, tuple[str, list[list[str]]]]:
    """
    Returns heading in the help of `train` -> package, and the file and class of the fields below it. Later classes
    override.
    """
    classes = trl_configs()[trainer]
    return {
        "ModelConfig of TRL": ("trl", [["trainer/model_config.py", "ModelConfig"]]),
        f"{classes[-1][1]} of TRL": ("trl", classes),
        "TrainingArguments of transformers": ("transformers", [["training_args.py", "TrainingArguments"]]),
    }


def _classes(package: str, file: str) -> dict[str, ast.ClassDef]:
    """Returns name -> syntax tree of the classes in a file of an installed package."""
    source = Path(find_spec(package).origin).parent / file
    with reading(source):
        found = ast.parse(source.read_text("utf-8")).body
    return {node.name: node for node in found if isinstance(node, ast.ClassDef)}


def _fields(package: str, file: str, name: str) -> Iterator[tuple[str, Option]]:
    """Yields the name and the option of each field of a dataclass, from its source."""
    for statement in _classes(package, file)[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call):
            yield statement.target.id, _option(ast.unparse(statement.annotation), statement.value)


def _option(hint: str, field: ast.Call) -> Option:
    """Returns the option that transformers' parser makes of a field, `field(default=..., metadata=...)`."""
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
    """Returns the type that transformers' parser uses for a union."""
    parts = hint.split(" | ")
    if len(parts) == 1 or ("bool" in parts and "None" in parts):
        return hint
    if "None" in parts:
        return parts[0] if parts[1] == "None" else parts[1]
    return parts[0] if parts[1] == "str" else parts[1]


@cache
def _enums() -> dict[str, list[str]]:
    """Returns name -> values of transformers' enums."""
    classes = {name: node for file in ENUM_FILES for name, node in _classes("transformers", file).items()}
    return {
        name: [member.value.value for member in node.body if isinstance(member, ast.Assign)]
        for name, node in classes.items()
        if any(ast.unparse(base) == "ExplicitEnum" for base in node.bases)
    }


def _value(node: ast.expr | None, otherwise):
    """Returns the value of an expression of literals; `otherwise` for any other expression."""
    try:
        return otherwise if node is None else ast.literal_eval(node)
    except ValueError:
        return otherwise
