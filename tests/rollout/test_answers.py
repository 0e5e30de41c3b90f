"""What no policy can have sampled is refused, whichever engine or server returns it; what it can have is taken."""

import ast
import math
import re
from types import SimpleNamespace

import pytest
from made_up_engine import MadeUp
from places import ROOT
from sources import PACKAGE, called, nodes, none
from tiny import VOCAB_SIZE
from training import config, make

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.address import without_password
from trl_quant.rollout.answers import fault_of_end, fault_of_samples
from trl_quant.rollout.engine import Samples


MOST = 8  # tokens of a completion, as `training.config` sets them
# Name -> what is done to the samples (tokens, log-probabilities, tokens of these) of some prompts, and what is said
FAULTS = {
    "a completion too few": (lambda ids, logps, of: [rows.pop() for rows in (ids, logps, of)], "were asked for"),
    "no token": (lambda ids, logps, of: [rows[1].clear() for rows in (ids, logps, of)], "completion 1 has no token"),
    "too many tokens": (
        lambda ids, logps, of: [rows[1].extend(rows[1] * MOST) for rows in (ids, logps, of)],
        f"and at most {MOST} were asked for",
    ),
    "an unknown token": (
        lambda ids, logps, of: (ids[1].__setitem__(0, VOCAB_SIZE), of[1].__setitem__(0, [VOCAB_SIZE])),
        f"row 1 of 'completion_ids' holds {VOCAB_SIZE}, which is not a token",
    ),
    "a negative token": (
        lambda ids, logps, of: (ids[1].__setitem__(0, -1), of[1].__setitem__(0, [-1])),
        "row 1 of 'completion_ids' holds -1, which is not a token",
    ),
    "above 0": (lambda ids, logps, of: logps[1].__setitem__(0, [0.5]), "row 1 of 'logprobs' holds 0.5"),
    "-inf": (lambda ids, logps, of: logps[1].__setitem__(0, [-math.inf]), "row 1 of 'logprobs' holds -inf"),
    "missing ones": (lambda ids, logps, of: logps[1].pop(), "different lengths"),
    "two a position": (
        lambda ids, logps, of: (logps[1][0].append(-9.0), of[1][0].append(3)),
        "log-probabilities other than one",
    ),
    "of another token": (
        lambda ids, logps, of: of[1].__setitem__(0, [of[1][0][0] - 1]),
        "row 1 of 'logprobs' belongs to other tokens",
    ),
}
# What is left to the trainer, which counts it as unscored, or is rounding
TAKEN = {
    "nothing": lambda ids, logps, of: None,
    "NaN": lambda ids, logps, of: logps[1].__setitem__(0, [math.nan]),
    "None": lambda ids, logps, of: logps[1].__setitem__(0, [None]),
    "rounding": lambda ids, logps, of: logps[1].__setitem__(0, [9e-4]),
    "as many tokens as asked": lambda ids, logps, of: [rows[1].extend(rows[1][:3]) for rows in (ids, logps, of)],
}


def samples(count: int) -> tuple[list, list, list]:
    ids = MadeUp().sample([[]] * count).token_ids
    return ids, [[[-3.25] for _ in row] for row in ids], [[[token] for token in row] for row in ids]


def spoilt(change, count: int) -> tuple[list, list, list]:
    found = samples(count)
    change(*found)
    return found


@pytest.mark.parametrize("case", [*FAULTS, *TAKEN])
def test_samples_that_no_policy_has_drawn(case):
    change, said = FAULTS.get(case) or (TAKEN[case], None)
    fault = fault_of_samples(*spoilt(change, 4), count=4, vocabulary=VOCAB_SIZE, most=MOST)
    assert (said in fault) if said else fault is None


def test_no_engine_passes_the_check_by():
    """Of all classes in the sources, `draw`, which checks, is the base's alone."""
    own, bases = {}, {}
    for path in (ROOT / PACKAGE / "rollout").rglob("*.py"):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base) for base in node.bases}
                own[node.name] = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    ours = {"RolloutEngine"}
    while grown := {name for name, of in bases.items() if of & ours} - ours:
        ours |= grown
    assert {"VLLMEngine", "VLLMServerEngine", "TransformersEngine", "AdaptedEngine"} <= ours
    assert [name for name in sorted(ours) if "draw" in own[name]] == ["RolloutEngine"]
    assert "fault_of_samples" in map(called, ast.walk(own["RolloutEngine"]["draw"]))


class SpoilingEmbedded(QuantGRPOTrainer):
    """A trainer whose engine returns spoilt samples."""

    change = None

    def build_engine(self, *args, **kwargs):
        engine = self.made(*args, **kwargs)
        engine.sample = self.spoilt_samples
        return engine

    def made(self, *args, **kwargs):
        return super().build_engine(*args, **kwargs)

    def spoilt_samples(self, requests) -> Samples:
        ids, logps, _ = spoilt(self.change, len(requests))
        return Samples(ids, [[value for (value,) in row] for row in logps])


class SpoilingMadeUp(SpoilingEmbedded):
    def made(self, *args, **kwargs):
        return MadeUp()


def test_an_engine_that_returns_them(tmp_path):
    """The embedded one and a user's own, in a run: the fault is told, and what is right is trained on."""
    for trainer_class in (SpoilingMadeUp, SpoilingEmbedded):
        trainer = make(trainer_class, config(QuantGRPOConfig, tmp_path, rollout_precision="int8"))
        for case in ("an unknown token", "above 0", "-inf", "too many tokens", "a completion too few"):
            trainer_class.change = staticmethod(FAULTS[case][0])
            with pytest.raises(RuntimeError, match=f"cannot have drawn: .*{FAULTS[case][1]}"):
                trainer._generate(["a"] * 4)
        for case, change in TAKEN.items():
            trainer_class.change = staticmethod(change)
            assert len(trainer._generate(["a"] * 4)[1]) == 4, case


# Answers of a server


def client(answer: dict):
    """A client whose server answers every request with this."""
    module = pytest.importorskip("trl_quant.rollout.vllm.client")
    made = object.__new__(module.Client)
    made.base_url, made.model, made.token = "http://me:secret@127.0.0.1:8000", "model", None
    made.seconds, made.vocabulary = 5.0, VOCAB_SIZE
    reply = SimpleNamespace(status_code=200, json=lambda: answer, text="", content=b"")
    made.session = SimpleNamespace(send=None, post=lambda url, **kwargs: reply)
    return made


def answered(ids, logps, of, prompts, **others) -> dict:
    """The answer of `vllm serve` with these samples, as TRL's client asks for it."""

    def scores(values, tokens) -> dict:
        named = [[f"token_id:{token}" for token in row] for row in tokens]
        tops = [dict(zip(names, row, strict=True)) for names, row in zip(named, values, strict=True)]
        return {
            "tokens": [names[0] for names in named],
            "token_logprobs": [row[0] for row in values],
            "top_logprobs": tops,
        }

    rows = zip(prompts, ids, logps, of, strict=True)
    choices = [
        {"prompt_token_ids": prompt, "token_ids": row, "logprobs": scores(values, tokens), "finish_reason": "length"}
        | others
        for prompt, row, values, tokens in rows
    ]
    return {"choices": choices}


PROMPTS = [[1, 2], [3], [4, 5], [6]]
ASKED = {"n": 1, "max_tokens": MOST, "logprobs": 0}


@pytest.mark.parametrize("case", FAULTS)
def test_a_server_that_returns_them(case):
    change, said = FAULTS[case]
    found = samples(4)
    change(*found)
    prompts = PROMPTS[: len(found[0])]
    if len(found[1][-1]) != len(found[2][-1]) or case == "missing ones":
        found[2][1].pop()
    with pytest.raises(
        RuntimeError, match=r"The vLLM server at http://\*\*\*@127.0.0.1:8000 returned samples that"
    ) as e:
        client(answered(*found, prompts)).generate(PROMPTS, **ASKED)
    assert said in str(e.value) or case == "a completion too few"


def test_a_server_whose_samples_are_right():
    for case in ("nothing", "NaN", "rounding"):
        found = spoilt(TAKEN[case], 4)
        assert client(answered(*found, PROMPTS)).generate(PROMPTS, **ASKED)["completion_ids"] == found[0], case


@pytest.mark.parametrize("reason", ["abort", "error", None, "stop", "length", "repetition"])
def test_completions_that_a_server_has_dropped(reason):
    answer = answered(*samples(4), PROMPTS, finish_reason=reason)
    if reason in ("stop", "length", "repetition"):
        assert fault_of_end([reason]) is None
        assert len(client(answer).generate(PROMPTS, **ASKED)["completion_ids"]) == 4
        return
    with pytest.raises(RuntimeError, match=re.escape(f"completion 0 is not whole (finish_reason {reason!r})")):
        client(answer).generate(PROMPTS, **ASKED)


# Passwords in addresses


def test_a_password_is_not_shown():
    assert without_password("http://me:se@cret@host:1/x") == "http://***@host:1/x"
    assert without_password("no such host: 'https://me@h'") == "no such host: 'https://***@h'"
    assert without_password("http://host:1/a@b") == "http://host:1/a@b"
    pytest.importorskip("vllm")
    from trl_quant.rollout.vllm.serving import wait_for_server

    for url in ("http://me:secret@127.0.0.1:9", "http://me:secret@[::1"):
        args = config(
            QuantGRPOConfig,
            "out",
            rollout_precision="bf16",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_timeout=0.01,
        )
        args.vllm_server_base_url = url
        with pytest.raises((ConnectionError, ValueError)) as error:
            wait_for_server(args, "model")
        assert "secret" not in str(error.value) and "***@" in str(error.value)
        assert error.value.__cause__ is None or "secret" not in str(error.value.__cause__)


def addresses_in_messages(sources: dict[str, str]) -> list[str]:
    """Texts and log entries that hold an address as it was given: those that are not the start of a request's URL."""
    found = []
    for path, text in sources.items():
        for node in nodes(text):
            if isinstance(node, ast.JoinedStr):
                for part, after in zip(node.values, [*node.values[1:], None]):
                    is_address = isinstance(part, ast.FormattedValue) and is_raw(part.value)
                    request = isinstance(after, ast.Constant) and after.value.startswith("/")
                    found += [f"{path}:{node.lineno}"] if is_address and not request else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                found += [f"{path}:{node.lineno}" for part in node.args if is_raw(part)]
    return found


def is_raw(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("base_url", "vllm_server_base_url", "url")


def test_messages_show_addresses_without_passwords():
    sources = {str(path): path.read_text() for path in (ROOT / PACKAGE).rglob("*.py")}
    none(addresses_in_messages(sources))
    made_up = (
        'f"{self.base_url}/x"\nf"at {self.base_url}: {url!r}"\nlogger.warning("%s", client.base_url)\nf"{url}/y"\n'
    )
    assert addresses_in_messages({"a": made_up}) == ["a:2", "a:2", "a:3"]
