"""Precisions, formats, corrections and layers are asked for their traits: none is listed or told by its name."""

import ast
import re

from sources import (
    LISTS_OF_PRECISIONS,
    PACKAGE,
    Sources,
    Violations,
    called,
    matches,
    modules,
    nodes,
    none,
    parsed,
    strings,
)

from trl_quant.formats import FORMATS


# Precisions


def precisions(sources: Sources) -> set[str]:
    """The entries of the table."""
    tables = [node for node in parsed(sources[f"{PACKAGE}/precisions.py"]).body if isinstance(node, ast.AnnAssign)]
    (table,) = [node.value for node in tables if ast.unparse(node.target) == "PRECISIONS"]
    return set(strings(table.keys))


def lists_of_precisions(sources: Sources, names: set[str]) -> Violations:
    found = []
    for module, text in modules(sources).items():
        for node in nodes(text):
            words = []
            if isinstance(node, ast.List | ast.Tuple | ast.Set):
                words = strings(node.elts)
            elif isinstance(node, ast.Dict):
                words = strings([*node.keys, *node.values])
            elif called(node) == "dict":
                words = [keyword.arg for keyword in node.keywords]
            elif called(node) == "split":
                words = [word for string in strings([getattr(node.func, "value", None)]) for word in string.split()]
            listed = sorted(names & set(words))
            if len(listed) > 2 and not matches(module, LISTS_OF_PRECISIONS):
                found.append(f"{PACKAGE}/{module}:{node.lineno} lists {', '.join(listed)}")
    return found


def test_one_table_of_precisions(sources):
    """A new precision is one entry there: a list of them elsewhere is a second one, or a trait that has no name."""
    names = precisions(sources)
    assert {"bf16", "fp8", "int8"} < names
    none(lists_of_precisions(sources, names))
    listing = """A = {"bf16": 1, "fp8": {"int8": 2}, **B}
C = {1: "bf16", 2: "fp8", 3: "int8"}
if x in ("nf4", "int4", "nvfp4", y): ...
D = dict(bf16=1, fp8=2, int8=3), "bf16 fp8 mxfp4".split()
"""
    made_up = dict.fromkeys(("trl_quant/config.py", "trl_quant/formats/x.py", "tests/x.py"), listing)
    assert lists_of_precisions(made_up, names) == [
        "trl_quant/config.py:2 lists bf16, fp8, int8",
        "trl_quant/config.py:3 lists int4, nf4, nvfp4",
        "trl_quant/config.py:4 lists bf16, fp8, int8",
        "trl_quant/config.py:4 lists bf16, fp8, mxfp4",
    ]


# Corrections

AMBIGUOUS = {"none", "trl"}  # also names of other things, so they count where a correction is compared


def comparisons_with_names(sources: Sources, names: set[str]) -> Violations:
    """Comparisons with one of some `names`, other than of a command's own options."""
    found = []
    for module, text in modules(sources).items():
        for node in nodes(text):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                parts = [part for side in sides for part in [side, *getattr(side, "elts", [])]]
                is_of_corrections = "correction" in ast.unparse(node)
            elif isinstance(node, ast.Match):
                parts = [part.value for case in node.cases for part in ast.walk(case.pattern) if hasattr(part, "value")]
                is_of_corrections = "correction" in ast.unparse(node.subject)
            else:
                continue
            if is_of_corrections and names & set(strings(parts)):
                code = ast.unparse(node).splitlines()[0]
                found.append(f"{PACKAGE}/{module}:{node.lineno} compares a correction's name: {code}")
    return found


def test_corrections_are_asked_for_their_traits(sources):
    tables = [node for node in nodes(sources[f"{PACKAGE}/corrections/__init__.py"]) if isinstance(node, ast.Dict)]
    names = {name for table in tables for name in strings(table.keys)}
    assert {"trl", "none", "acr"} < names
    none(comparisons_with_names(sources, names))
    none(compared_names(sources, names - AMBIGUOUS, ("corrections/...",)))
    made_up = {
        "trl_quant/x.py": "if args.is_correction == 'trl' or args.is_correction in ('none', x): ...\n"
        "a = correction != 'acr'\nb = args.format == 'none'\nc = CORRECTIONS['tis'], args.is_correction == name\n"
        "match args.is_correction:\n    case 'acr' | 'trl': ...\nmatch args.format:\n    case 'none': ...\n",
    }
    assert [line.partition(" compares ")[0] for line in comparisons_with_names(made_up, names)] == [
        "trl_quant/x.py:5",
        "trl_quant/x.py:2",
        "trl_quant/x.py:1",
        "trl_quant/x.py:1",
    ]
    made_up = dict.fromkeys(("trl_quant/config.py", "trl_quant/corrections/x.py"), "if name in ('none', 'tis'): ...\n")
    found = compared_names(made_up, names - AMBIGUOUS, ("corrections/...",))
    assert found == ["trl_quant/config.py:1 compares with tis"]


def compared_names(sources: Sources, names: set[str], rooms: tuple[str, ...] = LISTS_OF_PRECISIONS) -> Violations:
    """Comparisons with one of the `names`, outside the rooms that have a file or a kernel for each of them."""
    found = []
    for module, text in modules(sources).items():
        for node in nodes(text):
            sides = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                sides = [node.value]
            sides += [part for side in sides if isinstance(side, ast.List | ast.Tuple | ast.Set) for part in side.elts]
            compared = sorted(names & set(strings(sides)))
            if compared and not matches(module, rooms):
                found.append(f"{PACKAGE}/{module}:{node.lineno} compares with {', '.join(compared)}")
    return found


def test_formats_are_asked_for_their_traits(sources):
    """A format or a precision that is compared by its name has a trait without one."""
    names = set(FORMATS)
    none(compared_names(sources, names))
    comparing = """if x == "fp8": ...
if "int8" != x or y in ("nf4", z): ...
if x in FORMATS and y == "bf16": ...
match x:
    case "mxfp4": ...
"""
    made_up = dict.fromkeys(("trl_quant/config.py", "trl_quant/formats/x.py", "tests/x.py"), comparing)
    assert compared_names(made_up, names) == [
        "trl_quant/config.py:1 compares with fp8",
        "trl_quant/config.py:2 compares with int8",
        "trl_quant/config.py:2 compares with nf4",
        "trl_quant/config.py:5 compares with mxfp4",
    ]


# Quantized layers

LAYER_NAMES = re.compile(r"(?<![a-z_])([qkvo]_proj|(gate|up|down|qkv|gate_up)_proj|experts|lm_head)(?![a-z_])")
# Where layers may be named: the map of models, and what asks vLLM for the head of its own model
NAMING_LAYERS = ("models/...", "rollout/vllm/repairs.py", "rollout/vllm/lifetime.py")
# Where layers may be told apart by `nn.Linear`: the map, and what checks that a saved adapter adapts nothing else
PICKING_LAYERS = ("models/...", "storage/adapter.py")
WALKS = {"modules", "named_modules", "children", "named_children"}


def named_layers(sources: Sources) -> Violations:
    """Literals with the name of a linear layer in them, apart from docstrings and messages, which have spaces."""
    found = []
    for module, text in modules(sources).items():
        if matches(module, NAMING_LAYERS):
            continue
        docstrings = {node.value for node in nodes(text) if isinstance(node, ast.Expr)}
        for node in nodes(text):
            for literal in strings([node]):
                name = None if node in docstrings or re.search(r"\s", literal) else LAYER_NAMES.search(literal)
                if name is not None:
                    found.append(f"{PACKAGE}/{module}:{node.lineno} names {name[0]}; ask models/linears.py")
    return found


def picked_layers(sources: Sources) -> Violations:
    """Loops over the modules of a model that ask which of them are `nn.Linear`."""
    found = []
    for module, text in modules(sources).items():
        if matches(module, PICKING_LAYERS):
            continue
        for node in nodes(text):
            loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
            walks = [loop for loop in loops if {called(part) for part in ast.walk(loop.iter)} & WALKS]
            walked = {part.id for loop in walks for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
            for part in ast.walk(node) if walked else ():
                if asks_for_linear(part, walked):
                    found.append(f"{PACKAGE}/{module}:{part.lineno} picks linear layers; ask models/linears.py")
    return found


def asks_for_linear(node: ast.AST, names: set[str]) -> bool:
    """Whether a node is `isinstance(x, nn.Linear)` or `type(x) is nn.Linear`, where `x` has to do with `names`."""
    if called(node) == "isinstance":
        asked, kinds = node.args
    elif isinstance(node, ast.Compare) and called(node.left) == "type":
        asked, kinds = node.left.args[0], node.comparators[0]
    else:
        return False
    linear = any(getattr(part, "attr", getattr(part, "id", None)) == "Linear" for part in ast.walk(kinds))
    return linear and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(asked))


def test_models_decide_what_is_quantized(sources):
    none(named_layers(sources))
    none(picked_layers(sources))
    choosing = """\"\"\"Such as q_proj.\"\"\"
FUSED = (("q_proj", "k_proj"),)
if ".experts." in name or name == "lm_head" or re.match(r"(.*\\.)?gate_up_proj$", name): ...
raise ValueError("the model has no lm_head")
print("experts_per_token", "down_projection", model.layers[0].mlp.up_proj)
"""
    picking = """for name, module in list(model.named_modules()):
    if isinstance(module, torch.nn.Linear): ...
    if isinstance(base_layer(module), nn.Linear) or isinstance(module, FrozenLinear): ...
layers = [m for m in decoder.modules() if type(m) is Linear and isinstance(model, nn.Linear)]
count = sum(isinstance(m, (nn.Linear, Conv1D)) for m in decoder.modules())
kinds = [isinstance(layer, nn.Linear) for layer in layers]
"""
    paths = ("trl_quant/policy/x.py", "trl_quant/models/x.py", "tests/x.py")
    assert [line.partition(";")[0] for line in named_layers(dict.fromkeys(paths, choosing))] == [
        "trl_quant/policy/x.py:2 names q_proj",
        "trl_quant/policy/x.py:2 names k_proj",
        "trl_quant/policy/x.py:3 names experts",
        "trl_quant/policy/x.py:3 names lm_head",
        "trl_quant/policy/x.py:3 names gate_up_proj",
    ]
    assert [line.partition(";")[0] for line in picked_layers(dict.fromkeys(paths, picking))] == [
        "trl_quant/policy/x.py:2 picks linear layers",
        "trl_quant/policy/x.py:3 picks linear layers",
        "trl_quant/policy/x.py:4 picks linear layers",
        "trl_quant/policy/x.py:5 picks linear layers",
    ]
