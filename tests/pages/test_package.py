"""The wheel: what is in it, and that it works installed, away from the checkout."""

import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

import trl_quant


FOLDERS = ("trl_quant", "benchmarks", "configs", "examples", "tests")  # the wheel must hold the first alone
EXTRAS = {"vllm", "cpu", "compress", "deepspeed", "bnb", "dev"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command, **kwargs) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the checkout, where no old `build` holds modules that are long gone."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out, copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel, contents) -> Message:
    (name,) = (name for name in contents if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(zipfile.ZipFile(wheel).read(name))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """`bin` of a new virtual environment with the wheel in it, which finds dependencies where these tests find them."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place)
    binaries = place / "bin"
    run(*PIP, "--python", binaries / "python", "install", "--no-deps", "--no-index", wheel)
    (packages,) = place.glob("lib/python*/site-packages")
    # A .pth file adds folders, but not the .pth files in them: an editable install of the checkout has no effect.
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "dependencies.pth").write_text("\n".join(folders))
    return binaries


def test_wheel_holds_the_package_and_nothing_else(contents):
    files = (path.relative_to(ROOT) for path in (ROOT / "trl_quant").rglob("*") if path.is_file())
    expected = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert "trl_quant/trainer.py" in expected
    assert {name for name in contents if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in contents)


def test_a_release_has_the_notes_of_its_version(tmp_path):
    """What CHANGELOG says of the package's version, and of no other; and no release without it."""
    version = trl_quant.__version__
    for name in ("Makefile", "CHANGELOG.md", "requirements/default.txt", "trl_quant/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "dist").mkdir()
    release = ["make", "-C", tmp_path, "--old-file", "wheel", "release"]  # the wheel has tests of its own
    run(*release)
    notes = (tmp_path / f"dist/trl_quant-{version}.md").read_text()
    _, after = (ROOT / "CHANGELOG.md").read_text().split(f"## [{version}]\n")
    section, _, earlier = after.partition("\n## [")
    assert notes.strip() == section.strip() and earlier.startswith("0.1.0]")
    assert len([line for line in notes.splitlines() if line]) <= 45  # what a reader takes in
    source = tmp_path / "trl_quant/__init__.py"
    source.write_text(source.read_text().replace(version, "9.9.9"))
    failed = subprocess.run(release, capture_output=True, text=True)
    assert failed.returncode and "CHANGELOG.md does not have version 9.9.9." in failed.stdout
    assert not (tmp_path / "dist/trl_quant-9.9.9.md").exists()


def test_every_folder_with_modules_is_a_package():
    """`find:` leaves out the others in silence."""
    folders = {path.parent for path in (ROOT / "trl_quant").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_metadata(metadata):
    assert metadata["Name"] == "trl_quant" and metadata["Version"] == trl_quant.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) >= EXTRAS
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload(decode=True).decode()
    assert description.startswith("# trl_quant") and "docs/memory.md" in description
    assert "](docs/" not in description  # PyPI has no files beside it


def test_plain_install_adds_little_to_trl(metadata):
    """A project on TRL keeps its torch, and gets neither vLLM nor llmcompressor."""
    requirements = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    names = {re.match(r"[\w-]+", text).group().lower() for text in requirements}
    trls = {"torch", "trl", "transformers", "accelerate", "datasets", "peft"}
    assert names <= trls | {"huggingface_hub", "math-verify", "mpmath", "rich", "matplotlib"}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (pin,) = re.findall(r"^trl\S+$", setup["options"]["install_requires"], re.MULTILINE)
    assert Requirement(pin) in map(Requirement, requirements)
    assert sorted(bound.operator for bound in Requirement(pin).specifier) == ["<", ">="]
    assert all("==" not in text for text in requirements)


# Rooms -> the libraries that they are for, whose own requirements they may import
COMPRESS = ("llmcompressor", "compressed-tensors")
ROOMS_OF = {"rollout/vllm": ("vllm",), "scaling/modifier.py": COMPRESS, "storage/awq.py": COMPRESS}
OPTIONAL = {"vllm", "llmcompressor", "triton", "deepspeed"}  # imported where they are


def required(distribution: str) -> set[str]:
    """What a distribution requires itself, without extras."""
    requirements = map(Requirement, requirements_of(distribution))
    return {canonicalize_name(one.name) for one in requirements if not one.marker or one.marker.evaluate({"extra": ""})}


def requirements_of(name: str) -> list[str]:
    """The requirements of a distribution as it states them; none if it is not installed."""
    for known in (name, f"{name}-cpu"):
        try:
            return requires(known) or []
        except PackageNotFoundError:
            continue
    return []


def imported(source: str) -> set[str]:
    """Libraries that a file of ours imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"trl_quant"}


def undeclared(sources: dict[str, str]) -> list[str]:
    """Imports of what `pip install trl_quant` brings by chance: neither declared nor required by what is."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = {canonicalize_name(Requirement(line).name) for line in setup["options"]["install_requires"].split()}
    brought, packages = declared.union(*map(required, declared)), packages_distributions()
    found = []
    for path, source in sources.items():
        of_room = [name for room, libraries in ROOMS_OF.items() if path.startswith(room) for name in libraries]
        if not all(map(requirements_of, of_room)):  # the library is not installed
            continue
        allowed = brought.union(*map(required, of_room))
        for library in imported(source) - OPTIONAL:
            names = {canonicalize_name(name) for name in packages.get(library, [library])}
            if not names & allowed:
                found.append(f"{path} imports {library}")
    return found


def test_what_is_imported_is_declared():
    package = ROOT / "trl_quant"
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    assert undeclared(sources) == []
    # what rich requires requires mdurl, as long as it does
    made_up = {"a.py": "import mdurl", "cli/b.py": "def f():\n    from mdurl.x import y", "c.py": "import torch, tqdm"}
    assert undeclared(made_up) == ["a.py imports mdurl", "cli/b.py imports mdurl"]


@pytest.mark.long
def test_installed_package_imports_away_from_the_checkout(environment, tmp_path):
    code = (
        "import trl_quant\n"
        "print(trl_quant.__file__)\n"
        "for name in trl_quant.__all__:\n"
        "    print(name, getattr(trl_quant, name))\n"
    )
    # -I: neither the working directory nor PYTHONPATH is searched
    first, *names = run(environment / "python", "-I", "-c", code, cwd=tmp_path).splitlines()
    assert Path(first).is_relative_to(environment.parent) and ROOT not in Path(first).parents
    assert "QuantGRPOTrainer <class 'trl_quant.trainers.grpo.QuantGRPOTrainer'>" in names


def test_installed_command(environment, tmp_path):
    text = run(environment / "trl-quant", "--help", cwd=tmp_path)
    assert all(command in text for command in ("prepare", "train", "report"))


def test_what_an_import_loads():
    """
    What is said to be pure torch works where only torch is installed, the engines' protocol loads no host, and a config
    is parsed and checked without an engine or a trainer, both of which take seconds to load: TRL's trainer loads vLLM
    where it is installed.
    """
    late = {"trl.trainer.grpo_trainer", "trl_quant.trainers", "vllm"}
    steps = {
        "import trl_quant": ({"trl_quant"}, {"triton", "trl", "vllm"}),
        "import trl_quant.formats, trl_quant.corrections, trl_quant.noise, trl_quant.models.norms, "
        "trl_quant.precisions, trl_quant.layers": ({"torch"}, {"transformers", "trl", "trl_quant.kernels", "vllm"}),
        "import trl_quant.rollout.engine, trl_quant.run_spec": (
            {"trl_quant.rollout.engine", "trl_quant.run_spec"},
            {"accelerate", "peft", "transformers", "trl", "trl_quant.config", "trl_quant.rollout.vllm", "vllm"},
        ),
        "import trl_quant.config": ({"trl", "transformers"}, late),
        "trl_quant.config.QuantGRPOConfig(output_dir='unused', use_cpu=True, bf16=False, report_to=[], "
        "rollout_precision='int8', use_vllm=True, vllm_mode='colocate')": ({"trl_quant.config"}, late),
        "import trl_quant.config.before_loading": ({"trl_quant.storage"}, late),
    }
    code = "import json, sys\n" + "".join(f"{step}\nprint(json.dumps(list(sys.modules)))\n" for step in steps)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (step, (needed, forbidden)), line in zip(steps.items(), done.stdout.splitlines(), strict=True):
        loaded = set(json.loads(line))
        assert needed <= loaded, f"this test would not see what `{step}` loads"
        assert not forbidden & loaded, f"`{step}` loads {sorted(forbidden & loaded)}"


def test_earlier_paths_lead_to_the_same_classes():
    """Paths that other people's code and command lines hold, among them a checkpoint's pickled arguments."""
    import trl_quant
    from trl_quant import config, rollout, trainer

    for name in ("QuantGRPOTrainer", "AISGRPOTrainer"):
        assert getattr(trainer, name) is getattr(trl_quant, name)
    for name in ("QuantGRPOConfig", "AISGRPOConfig"):
        assert getattr(config, name) is getattr(trl_quant, name)
    assert rollout.TransformersEngine.__name__ == "TransformersEngine"


@pytest.mark.vllm
def test_earlier_paths_of_vllm():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from trl_quant import rollout
    from trl_quant.rollout import vllm_server_worker

    assert rollout.VLLMEngine.__name__ == "VLLMEngine"
    assert vllm_server_worker.WorkerExtension.__name__ == "WorkerExtension"
