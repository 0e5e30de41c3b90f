"""The protocol of an engine: a made-up one of ten lines trains a real trainer; our own inherit nothing from TRL."""

import ast
import copy
import gc
import inspect
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from drawing import generated
from made_up_engine import MadeUp
from tiny import tiny_model, tiny_tokenizer
from training import metrics, trainer_for
from trl.generation.vllm_generation import VLLMGeneration

import trl_quant
from trl_quant import QuantGRPOTrainer, rollout
from trl_quant.rollout import ENGINES, RolloutEngine, TransformersEngine
from trl_quant.rollout.base import AdaptedEngine
from trl_quant.rollout.engine import Request, Samples, requests_for
from trl_quant.rollout.settings import SAMPLING, SamplingSettings, VLLMSettings
from trl_quant.rollout.trl_face import QuantGeneration, recording


class MadeUpTrainer(QuantGRPOTrainer):
    """Samples from the engine above."""

    def build_engine(self, spec, model, accelerator, processing_class, **settings):
        self.seen = spec, model, settings["max_completion_length"]
        return MadeUp()


trainer_of = partial(trainer_for, kind=MadeUpTrainer, rollout_precision="bf16")


def test_a_trainer_learns_from_a_made_up_engine(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=4)
    assert trainer.seen[0].kind == "embedded" and trainer.seen[1:] == (trainer.model, 8)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    generation = trainer.vllm_generation
    assert isinstance(generation.sampler, AdaptedEngine) and isinstance(generation.engine, MadeUp)
    assert generation.engine.syncs == 4  # once a step, since the optimizer moved the policy in between
    logs = [log for log in metrics(trainer) if "loss" in log]
    assert len(logs) == 4 and all(log["completions/mean_length"] == 5 for log in logs)
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    # The correction compares the engine's log-probabilities with the policy's: uniform over 320 tokens, about -5.8
    assert all(log["mismatch/kl_k1"] > 1 for log in logs)


def test_its_samples_are_those_that_the_trainer_scores(tmp_path):
    trainer = trainer_of(tmp_path)
    prompts = [{"prompt": "1+1="}] * 8
    batch = trainer._generate_and_score_completions(prompts)
    expected = MadeUp().sample([[]] * 8)
    assert batch["completion_ids"].tolist() == expected.token_ids
    assert (batch["sampling_per_token_logps"] == -3.25).all()
    trainer._generate_and_score_completions(prompts)
    assert trainer.vllm_generation.engine.syncs == 1  # of one step, whose policy did not change
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1.0)
    trainer._generate_and_score_completions(prompts)
    assert trainer.vllm_generation.engine.syncs == 2


def test_an_engine_that_knows_no_log_probabilities(tmp_path):
    """Its tokens are not corrected: TRL takes `None` for unknown."""
    trainer = trainer_of(tmp_path)
    trainer.vllm_generation.engine.sample = lambda requests: Samples([[70, 71] for _ in requests])
    assert trainer.vllm_generation.generate([[5], [6]], None, 1) == (
        [[5], [6]],
        [[70, 71], [70, 71]],
        [[[None], [None]], [[None], [None]]],
        [[[70], [71]], [[70], [71]]],
    )
    assert trainer._generate_and_score_completions([{"prompt": "a"}] * 8)["sampling_per_token_logps"].isnan().all()


def test_many_tokens_do_not_set_off_garbage_collection(tmp_path):
    """A list for each token would, three times: beside a vLLM engine each collection of all objects takes long."""
    generation = trainer_of(tmp_path, max_completion_length=1000).vllm_generation
    ids = [[70, 71] * 500 for _ in range(60)]
    generation.engine.sample = lambda requests: Samples(ids, [[-3.25] * 1000 for _ in requests])
    phases = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: phases.append(phase))
    try:
        _, tokens, logps, of_tokens = generation.generate([[5]] * 60, None, 1)
    finally:
        gc.callbacks.pop()
    collections = phases.count("start")
    assert collections <= 3  # of the few objects that each completion has, where 180,000 lists take about 260
    values = [[value for (value,) in row] for row in logps]
    assert tokens == ids and values == [[-3.25] * 1000] * 60 and type(values[0][0]) is float
    rows = torch.tensor(logps)  # as of lists
    assert rows.shape == (60, 1000, 1) and rows.dtype == torch.float32 and (rows == -3.25).all()
    assert logps[0][1:3] == [[-3.25], [-3.25]] != logps[0][1:4]
    logps[0][1] = [None]
    assert logps[0][:3] == [[-3.25], [None], [-3.25]] and generation.turns[-1].logps[0][1] == -3.25
    assert [[token for (token,) in row] for row in of_tokens] == ids


def test_what_only_our_engines_can_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`rollouts_in_flight`=2.0, but MadeUp.sample has no argument `enough`"):
        trainer_of(tmp_path, rollouts_in_flight=2.0)
    with pytest.raises(ValueError, match=r"`noise_schedule` acts only on the engines of this package.*a MadeUp"):
        trainer_of(tmp_path, noise_schedule="linear")


def test_what_is_no_engine_is_refused(tmp_path):
    class Silent(QuantGRPOTrainer):
        def build_engine(self, *args, **settings):
            return SimpleNamespace(sync=lambda: None)

    with pytest.raises(ValueError, match=r"`build_engine` returned a SimpleNamespace without sample, so a run cannot"):
        trainer_of(tmp_path, kind=Silent)


@pytest.mark.parametrize("kind", ENGINES)
def test_our_engines_inherit_from_no_host_library(kind):
    ancestry = getattr(rollout, ENGINES[kind]).__mro__
    assert RolloutEngine in ancestry and ancestry[-1] is object
    assert all(owner.__module__.startswith("trl_quant.rollout") for owner in ancestry[:-1])


def subclasses_of_trls_generation(sources: dict[str, str]) -> list[str]:
    return [
        f"{path}: {node.name}"
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and "VLLMGeneration" in " ".join(map(ast.unparse, node.bases))
    ]


def test_one_class_inherits_from_trls_generation():
    package = Path(trl_quant.__file__).parent
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    assert subclasses_of_trls_generation(sources) == ["rollout/trl_face.py: QuantGeneration"]
    made_up = {"a.py": "class A(t.VLLMGeneration): ...", "b.py": "class B(A): ..."}
    assert subclasses_of_trls_generation(made_up) == ["a.py: A"]


# What TRL and users see


def engine(**options) -> TransformersEngine:
    return TransformersEngine(tiny_model(), Accelerator(cpu=True), tiny_tokenizer(), precision="int8", **options)


def shown(built: RolloutEngine, **given) -> QuantGeneration:
    return QuantGeneration(built, built.model, built.accelerator, built.processing_class, **given)


def test_it_is_trls_class_and_has_an_engine():
    built = engine()
    generation = shown(built, temperature=0.5, generation_kwargs={"seed": None, "stop_strings": "x"})
    assert isinstance(generation, VLLMGeneration) and generation.engine is built
    assert not isinstance(generation, RolloutEngine) and not isinstance(built, VLLMGeneration)
    assert generation.mode == "colocate" and generation.temperature == 0.5
    assert generation.settings == SamplingSettings(temperature=0.5, generation_kwargs={"stop_strings": "x"})
    for name in ("noise", "llm", "vllm_client", "no_such_thing"):  # of an engine, or of vLLM alone
        with pytest.raises(AttributeError, match=name):
            getattr(generation, name)


def test_a_generation_is_sampled_with_the_attributes_of_its_time():
    """And its turns are recorded: all of a generation, in the order in which they were asked for."""
    built = engine(max_completion_length=6)
    built.sync()
    generation = shown(built, max_completion_length=6)
    (longer,) = generation.generate([[5, 6, 7]], None, 1)[1]
    generation.max_completion_length, generation.temperature = 3, 0
    (short,) = generation.generate([[5, 6, 7]], None, 1)[1]
    assert len(longer) == 6 and len(short) == 3 and built.settings.most_tokens == 3
    (likeliest,) = built.score([[5, 6, 7, *short]])
    copy = built.copy(torch.tensor([[5, 6, 7, *short]])).logits[0, 2:-1]
    assert short == copy.argmax(-1).tolist() and len(likeliest) == 5
    assert [turn.prompts for turn in generation.turns] == [[[5, 6, 7]]]  # each call was a generation of its own
    with built.generation():
        generation.turns.clear()
        drawn = [generation.generate([ids], None, 1) for ids in ([5], [6, 7])]
    assert [turn.prompts for turn in generation.turns] == [[[5]], [[6, 7]]]
    assert [turn.logps for turn in generation.turns] == [[[logp for (logp,) in row] for row in d[2]] for d in drawn]


def test_trls_own_sampler_records_its_turns_too():
    """It is asked for the log-probabilities of drawn tokens, whatever the trainer asks for."""

    class TRLs:
        def __init__(self, logprobs):
            self.logprobs = logprobs

        def generate(self, prompts, images, num_generations):
            return prompts, [[7, 8]], [[[-1.0], [None]]], [[[7], [8]]]

    built = recording(TRLs)(logprobs=None)
    assert isinstance(built, TRLs) and built.logprobs == 0 and built.turns == []
    assert built.generate([[5]], None, 1) == ([[5]], [[7, 8]], [[[-1.0], [None]]], [[[7], [8]]])
    assert built.turns == [([[5]], [[-1.0, None]], None, None)]


def test_the_settings_are_trls():
    """The same names with the same defaults, but for the log-probabilities: engines return the drawn tokens'."""
    theirs = dict(list(inspect.signature(VLLMGeneration.__init__).parameters.items())[4:])
    ours = vars(SamplingSettings()) | vars(VLLMSettings())
    assert ours.keys() == theirs.keys() - {"logprobs"} and vars(SamplingSettings()).keys() == SAMPLING
    defaults = {name: parameter.default for name, parameter in theirs.items()}
    assert all(ours[name] == (defaults[name] or ours[name]) for name in ours) and ours["generation_kwargs"] == {}
    assert [name for name in ours if defaults[name] is not None and ours[name] != defaults[name]] == []


def test_settings_are_frozen():
    for settings in (SamplingSettings(), VLLMSettings(), Request([1])):
        with pytest.raises(FrozenInstanceError):
            settings.temperature = 2.0
    assert SamplingSettings(generation_kwargs={"max_tokens": 5}).most_tokens == 5
    assert VLLMSettings(server_host="a", server_port=1).server_url == "http://a:1"


def test_an_option_that_trl_does_not_know_is_refused():
    with pytest.raises(TypeError, match="no_such_option"):
        engine(no_such_option=1)


def test_nothing_is_started():
    """Also in colocate mode, TRL's default, and without vLLM."""
    assert not hasattr(shown(engine()), "llm")


def test_both_names_of_a_sync_are_one():
    """TRL calls `sync_weights`, another trainer `sync`."""
    for sync in (lambda built: built.sync(), lambda built: shown(built).sync_weights()):
        built = engine()
        assert not built.is_current
        sync(built)
        assert built.is_current and built.sync_metrics


def test_an_embedded_engine_scores_what_it_drew():
    """It gives a token the log-probability that it was drawn with; the policy gives it another one."""
    built, prompt = engine(max_completion_length=6), [5, 6, 7]
    torch.manual_seed(0)
    built.sync()
    samples = built.sample(requests_for([prompt]))
    (ids,), (logps,) = samples.token_ids, samples.logps
    (scored,) = built.score([prompt + ids])
    assert len(scored) == len(prompt + ids) - 1
    assert scored[len(prompt) - 1 :] == pytest.approx(logps, abs=1e-5)
    with torch.no_grad():
        policy = built.model(torch.tensor([prompt + ids])).logits[0, :-1].log_softmax(-1)
    policy = policy.gather(-1, torch.tensor([prompt + ids])[0, 1:, None])[:, 0]
    assert (torch.tensor(scored) - policy).abs().max() > 1e-3


def test_both_names_of_sampling_are_one():
    built = engine(max_completion_length=6)
    built.sync()
    torch.manual_seed(0)
    samples = built.sample(requests_for([[5, 6, 7], [8]]))
    torch.manual_seed(0)
    prompts, ids, logprobs, tokens = generated(built, [[5, 6, 7], [8]])
    assert prompts == [[5, 6, 7], [8]] and ids == samples.token_ids
    assert [[logp for (logp,) in row] for row in logprobs] == samples.logps
    assert [[token for (token,) in row] for row in tokens] == ids
