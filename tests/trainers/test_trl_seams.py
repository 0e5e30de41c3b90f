"""The parts of TRL that the package builds on: a failure here means that TRL has changed and `trl_quant` must follow.

They are few: the engine class, the keys of a scored batch, and the clip bounds and weights that the loss reads. All
are tested on TRL's own trainer, with a made-up engine.
"""

import configparser
import inspect

import pytest
import torch
import transformers
import trl
import trl.generation.vllm_generation as vllm_generation
import trl.trainer.grpo_trainer as grpo_trainer
from packaging.requirements import Requirement
from packaging.version import Version
from places import ROOT
from tiny import tiny_model, tiny_tokenizer
from training import config, dataset, make
from trl import DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop, _chain_to_sequences
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from trl_quant import QuantDistillationTrainer, QuantGRPOTrainer, QuantRLOOTrainer
from trl_quant.config.values import CLIPPED_LOSSES
from trl_quant.trl_seams import configured_for, unsharded


LOW, HIGH = 0.2, 0.28
SAMPLED = -5.0  # the log-probability that the engine below claims for each token

TRAINER = """model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks
    optimizers quantization_config peft_config tools rollout_func environment_factory"""
ENGINE = """model accelerator processing_class mode structured_outputs_regex server_base_url server_host server_port
    server_timeout group_port tensor_parallel_size gpu_memory_utilization max_model_length max_num_seqs
    enable_sleep_mode model_impl trust_remote_code repetition_penalty temperature top_p top_k min_p
    max_completion_length logprobs generation_kwargs"""
HIDDEN = """unwrapped_model input_ids attention_mask logits_to_keep pixel_values image_grid_thw pixel_attention_mask
    spatial_shapes image_sizes token_type_ids mm_token_type_ids image_position_ids"""
DIVERGENCE = """student_hidden student_weight student_bias teacher_hidden teacher_weight teacher_bias beta temperature
    student_logit_scale student_final_logit_softcapping teacher_logit_scale teacher_final_logit_softcapping"""
SIGNATURES = [
    (GRPOTrainer.__init__, TRAINER),
    (GRPOTrainer._generate, "prompts"),
    (GRPOTrainer._generate_single_turn, "prompt_ids images multimodal_fields num_generations has_tool_images"),
    (GRPOTrainer._generate_and_score_completions, "inputs"),
    (GRPOTrainer._calculate_rewards, "inputs prompts completions completion_ids_list"),
    (GRPOTrainer._compute_loss, "model inputs"),
    (GRPOTrainer._save_checkpoint, "model trial"),
    (RLOOTrainer._generate, "prompts"),
    (RLOOTrainer._generate_single_turn, "prompt_ids images multimodal_fields"),
    (RLOOTrainer._generate_and_score_completions, "inputs"),
    (RLOOTrainer._calculate_rewards, "inputs prompts completions completion_ids_list"),
    (RLOOTrainer._compute_loss, "model inputs"),
    (DistillationTrainer._generate, "prompts"),
    (DistillationTrainer._generate_single_turn, "prompt_ids images multimodal_fields has_tool_images"),
    (DistillationTrainer._generate_and_score_completions, "inputs"),
    (DistillationTrainer._get_last_hidden_state, HIDDEN),
    (DistillationTrainer._compute_loss, "unwrapped_student inputs num_items_in_batch"),
    (_AsyncRolloutLoop._generate_one, "prompt tool_dict tools group_id"),
    (_AsyncRolloutLoop._generate_one_turn, "prompt_ids"),
    (_AsyncRolloutLoop._push_metrics, "values"),
    (_chain_to_sequences, "rollout_id fork_threshold"),
    (ChunkedDivergenceFunction.forward, DIVERGENCE),
    (VLLMGeneration.__init__, ENGINE),
    (VLLMGeneration._init_vllm, ""),
    (VLLMGeneration.sync_weights, ""),
    (VLLMGeneration.generate, "prompts images num_generations profiler"),
    (VLLMClient.check_server, "total_timeout retry_interval"),
    (VLLMClient.init_communicator, "device"),
    (VLLMClient.update_named_params, "metadata named_params"),
]


class MadeUpEngine:
    """Replaces vLLM: completions of 3 to 6 tokens that do not come from the model."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs
        self.calls = []

    def sync_weights(self):
        self.calls.append("sync")

    def generate(self, prompts, images, num_generations, profiler=None):
        self.calls.append("generate")
        generator = torch.Generator().manual_seed(len(self.calls))
        lengths = [3 + i % 4 for i in range(len(prompts))]
        completions = [torch.randint(64, 90, (n,), generator=generator).tolist() for n in lengths]  # letters
        logps = [[[SAMPLED] for _ in ids] for ids in completions]
        return prompts, completions, logps, [[[token] for token in ids] for ids in completions]


def distinct_letters(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Builds TRL's trainer, or a subclass, with the made-up engine in place of vLLM."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", MadeUpEngine)

    def build(trainer_class=GRPOTrainer, model=None, **overrides):
        settings = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "loss_type": "bnpo"}
        args = config(GRPOConfig, tmp_path, **settings | {"epsilon": LOW, "epsilon_high": HIGH} | overrides)
        model = tiny_model(num_hidden_layers=1) if model is None else model
        trainer = make(trainer_class, args, model=model, reward_funcs=distinct_letters)
        trainer.current_gradient_accumulation_steps = 1  # set by `train`
        trainer.model.train()
        return trainer

    return build


def scored(trainer) -> dict[str, torch.Tensor]:
    """A scored batch of 2 prompts with 4 completions each; the policy has since moved by up to 0.6 nats."""
    prompts = [{"prompt": text} for text in dataset(2)["prompt"] for _ in range(4)]
    batch = trainer._generate_and_score_completions(prompts)
    moved = 1.2 * torch.rand(batch["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(0)) - 0.6
    batch["moved"] = moved
    batch["old_per_token_logps"] = batch["old_per_token_logps"] - moved
    return batch


def test_versions():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pins = map(Requirement, setup["options"]["install_requires"].strip().splitlines())
    allowed = {pin.name: pin.specifier for pin in pins}
    for library in (trl, transformers):
        assert Version(library.__version__) in allowed[library.__name__]


@pytest.mark.parametrize(("function", "names"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signatures(function, names):
    assert list(inspect.signature(function).parameters)[1:] == names.split()


def test_trls_client_sends_with_its_session():
    """Every request but that of `check_server`, which is limited by itself."""
    source = inspect.getsource(VLLMClient)
    assert "self.session = requests.Session()" in source
    assert source.count("requests.get(") == 1 == inspect.getsource(VLLMClient.check_server).count("requests.get(")
    assert "requests.post(" not in source


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (QuantGRPOTrainer, GRPOTrainer),
        (QuantRLOOTrainer, RLOOTrainer),
        (QuantDistillationTrainer, DistillationTrainer),
    ],
)
def test_our_trainer_takes_what_trls_takes(kind, base):
    """The same names, in the same order, with the same defaults."""
    ours, theirs = (inspect.signature(c.__init__).parameters for c in (kind, base))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_engine_is_looked_up_when_the_trainer_is_built(build):
    assert grpo_trainer.__dict__["VLLMGeneration"] is MadeUpEngine  # a module global, replaced by `build`
    trainer = build(vllm_mode="embedded")  # any name: the engine decides
    assert isinstance(trainer.vllm_generation, MadeUpEngine)
    given = trainer.vllm_generation.kwargs
    assert set(given) == set(ENGINE.split())
    assert given["model"] is trainer.model and given["mode"] == "embedded" and given["logprobs"] == 0


@pytest.mark.vllm
def test_vllm_is_looked_up_when_the_engine_is_built():
    """TRL's own, to which benchmarks give further arguments."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for name in ("LLM", "empty_cache"):
        assert name in VLLMGeneration._init_vllm.__globals__ and hasattr(vllm_generation, name)
    assert "LLM" in VLLMGeneration._init_vllm.__code__.co_names


def test_engine_is_synced_before_each_generation_and_only_then(build):
    trainer = build(max_steps=4, num_iterations=2)
    trainer.train()
    assert trainer.vllm_generation.calls == ["sync", "generate"] * 2


def test_scored_batch_has_the_keys_that_corrections_read(build):
    trainer = build()
    batch = trainer._generate_and_score_completions([{"prompt": "a"}] * 4 + [{"prompt": "bc"}] * 4)
    mask = batch["completion_mask"]
    assert mask.sum(1).tolist() == [3, 4, 5, 6, 3, 4, 5, 6]
    old, ratio, sampled = (
        batch[key] for key in ("old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps")
    )
    assert old.shape == sampled.shape == mask.shape
    assert torch.equal(sampled, SAMPLED * mask)  # 0 where padded

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], mask], 1)
    with torch.no_grad():
        logits = trainer.model(ids, attention_mask=attention).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(2, batch["completion_ids"][..., None])[..., 0]
    valid = mask.bool()
    torch.testing.assert_close(old[valid], expected[valid], rtol=1e-4, atol=1e-4)
    cap = trainer.args.vllm_importance_sampling_clip_max
    torch.testing.assert_close(ratio, torch.exp((old - sampled) * mask).clamp(max=cap))
    assert ratio[valid].std() > 0.1

    rewards = torch.tensor(distinct_letters(trainer.processing_class.batch_decode(batch["completion_ids"], True)))
    groups = rewards.view(2, 4)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    assert groups.std(1).min() > 0.5
    torch.testing.assert_close(batch["advantages"], expected.flatten())


def test_no_keys_of_the_sampler_without_one(build):
    trainer = build(use_vllm=False)
    batch = trainer._generate_and_score_completions([{"prompt": "a"}] * 4)
    assert not {"importance_sampling_ratio", "sampling_per_token_logps"} & set(batch)


def test_added_keys_follow_their_rows(build):
    """TRL shuffles a generation and splits it into micro-batches: tensors we add must move with their rows."""
    seen = []

    class Tagging(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return output | {"tag": output["completion_ids"] * 2 + 1, "order": torch.arange(len(inputs))}

        def _compute_loss(self, model, inputs):
            assert torch.equal(inputs["tag"], inputs["completion_ids"] * 2 + 1)
            seen.append(inputs["order"].tolist())
            return super()._compute_loss(model, inputs)

    build(Tagging, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1).train()
    first, second = seen
    assert sorted(first + second) == list(range(8)) and first + second != list(range(8))


@pytest.mark.parametrize("loss_type", CLIPPED_LOSSES)
def test_loss_clips_between_the_trainers_bounds(build, loss_type):
    """Constant tensors give the same loss as scalar bounds; wider tensors give another."""
    trainer = build(loss_type=loss_type)
    batch = scored(trainer)

    def loss(low, high):
        trainer.epsilon_low, trainer.epsilon_high = low, high
        return trainer._compute_loss(trainer.model, batch).item()

    shape = batch["moved"].shape
    scalar = loss(LOW, HIGH)
    assert loss(torch.full(shape, LOW), torch.full(shape, HIGH)) == pytest.approx(scalar, rel=1e-6)
    assert loss(torch.full(shape, LOW), torch.full(shape, 10.0)) != pytest.approx(scalar, rel=1e-2)
    assert loss(torch.full(shape, 0.9), torch.full(shape, HIGH)) != pytest.approx(scalar, rel=1e-2)


def test_loss_is_the_clipped_objective_with_bounds_of_each_token(build):
    """bnpo: -sum(w min(R A, clip(R, 1 - low, 1 + high) A)) / number of tokens, with each token's own bounds and w."""
    trainer = build()
    batch = scored(trainer)
    generator = torch.Generator().manual_seed(1)
    low, high, weights = (torch.rand(batch["moved"].shape, generator=generator) for _ in range(3))
    batch["importance_sampling_ratio"] = weights
    trainer.epsilon_low, trainer.epsilon_high = low, high
    loss = trainer._compute_loss(trainer.model, batch)

    mask, advantages, ratio = batch["completion_mask"], batch["advantages"][:, None], batch["moved"].exp()
    clipped = torch.maximum(torch.minimum(ratio, 1 + high), 1 - low)
    assert ((clipped != ratio) & mask.bool()).sum() > 3
    objective = weights * torch.minimum(ratio * advantages, clipped * advantages)
    torch.testing.assert_close(loss, -(objective * mask).sum() / mask.sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", [*CLIPPED_LOSSES, "cispo", "sapo", "vespo"])
def test_loss_reads_the_importance_sampling_ratio(build, loss_type):
    """A factor on each token's loss; VESPO applies it inside a function, where it still acts."""
    trainer = build(loss_type=loss_type)
    batch = scored(trainer)
    once = trainer._compute_loss(trainer.model, batch).item()
    batch["importance_sampling_ratio"] = 2 * batch["importance_sampling_ratio"]
    twice = trainer._compute_loss(trainer.model, batch).item()
    assert abs(once) > 1e-4
    if loss_type == "vespo":
        assert twice != pytest.approx(once, rel=1e-2)
    else:
        assert twice == pytest.approx(2 * once, rel=1e-5)


def test_loss_is_scored_before_it_is_weighted(build):
    """Without a pass that scores the batch: weights, bounds and old log-probabilities come from the loss's forward."""

    class Late(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if torch.is_grad_enabled():
                self.late["old_per_token_logps"] = scored[0].detach() - 1
                self.late["importance_sampling_ratio"] = torch.full_like(scored[0], 3.0)
                self.epsilon_low, self.epsilon_high = torch.zeros_like(scored[0]), torch.full_like(scored[0], 9.0)
            return scored

    trainer = build(Late)
    trainer.vllm_importance_sampling_correction = False  # read when a batch is scored
    prompts = [{"prompt": text} for text in dataset(2)["prompt"] for _ in range(4)]
    trainer.late = batch = trainer._generate_and_score_completions(prompts)
    assert not {"importance_sampling_ratio", "old_per_token_logps"} & set(batch) and "sampling_per_token_logps" in batch
    trainer.vllm_importance_sampling_correction = True  # ... and when the loss is computed
    loss = trainer._compute_loss(trainer.model, batch)
    mask, advantages = batch["completion_mask"], batch["advantages"][:, None]
    expected = -(3 * torch.tensor(1.0).exp() * advantages * mask).sum() / mask.sum()  # exp(1) is beyond 1 + HIGH
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)


def test_loss_reads_the_old_log_probabilities(build):
    """`coupled` replaces them with the sampler's."""
    trainer = build(importance_sampling_level="token")
    batch = scored(trainer)
    moved = trainer._compute_loss(trainer.model, batch).item()
    batch["old_per_token_logps"] = batch["old_per_token_logps"] + batch["moved"]  # where the policy is now
    mask, advantages = batch["completion_mask"], batch["advantages"][:, None]
    expected = -(batch["importance_sampling_ratio"] * advantages * mask).sum() / mask.sum()
    still = trainer._compute_loss(trainer.model, batch)
    torch.testing.assert_close(still, expected, rtol=1e-4, atol=1e-6)
    assert still.item() != pytest.approx(moved, rel=1e-2)


def test_a_config_for_several_processes(tmp_path):
    """TRL divides a generation by the processes that transformers counts; afterwards they are counted again."""
    given = {"per_device_train_batch_size": 2, "num_generations": 4, "generation_batch_size": 16}
    with configured_for(4):
        of_four = config(GRPOConfig, tmp_path, **given)
        assert of_four.world_size == 4
    of_one = config(GRPOConfig, tmp_path, **given)
    assert (of_four.steps_per_generation, of_one.steps_per_generation) == (2, 8) and of_four.world_size == 1


def test_a_trainer_of_a_sharded_run_in_one_process(tmp_path):
    """Without this context transformers refuses it; with it the policy stays on the host."""
    given = config(GRPOConfig, tmp_path, fsdp=True, fsdp_config={"version": 2})
    plugin = given.fsdp_plugin_args
    with pytest.raises(ValueError, match="fsdp only works in distributed"):
        GRPOTrainer(tiny_model(), len, given, train_dataset=dataset(), processing_class=tiny_tokenizer())
    with unsharded(given):
        trainer = GRPOTrainer(tiny_model(), len, given, train_dataset=dataset(), processing_class=tiny_tokenizer())
        assert trainer.place_model_on_device is False
    assert given.fsdp is True and given.fsdp_plugin_args is plugin and given.place_model_on_device is None
    plain = config(GRPOConfig, tmp_path)
    with unsharded(plain):
        assert plain.place_model_on_device is None  # a run that shards nothing has its policy on its device
