"""What we ask vLLM for is what TRL asks it for: engines, samples in this process, and samples of a server."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import requests
import torch
from accelerate import Accelerator
from PIL import Image
from tiny import save_tiny_vision, tiny_model, tiny_tokenizer
from transformers import Blip2ForConditionalGeneration
from trl.generation.vllm_generation import VLLMGeneration


pytest.importorskip("vllm", reason="vLLM is not installed")
import vllm
from vllm.multimodal.inputs import PlaceholderRange
from vllm_engines import engine, policy

from trl_quant.rollout import VLLMEngine, VLLMServerEngine
from trl_quant.rollout.engine import Request, Samples, requests_for
from trl_quant.rollout.trl_face import QuantGeneration
from trl_quant.rollout.vllm import server as vllm_server
from trl_quant.rollout.vllm.images import at_their_places, vllm_prompt
from trl_quant.rollout.vllm.server import placed


pytestmark = pytest.mark.vllm
PROMPTS = [[(7 * i + 3) % 250 for i in range(n)] for n in (60, 3) for _ in range(4)]
EOS = tiny_tokenizer().eos_token_id


def shown(sampler, **given) -> QuantGeneration:
    own = sampler.model, sampler.accelerator, sampler.processing_class
    return QuantGeneration(sampler, *own, **{"max_completion_length": 24} | given)


def trls(sampler, **given) -> QuantGeneration:
    """The same, for TRL's own `generate`: it does not know the policy's end tokens."""
    options = given.get("generation_kwargs") or {}
    ends = [] if options.get("ignore_eos") else [*options.get("stop_token_ids", []), EOS]
    return shown(sampler, **given | {"generation_kwargs": options | {"stop_token_ids": ends}})


@pytest.fixture(scope="module")
def sampler(tmp_path_factory) -> VLLMEngine:
    built = engine(policy(tmp_path_factory.mktemp("policy")), "bf16", max_completion_length=24)
    built.sync()
    return built


ASKED = {
    "nothing": {},
    "all settings": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
    "no min_p": {"min_p": None, "max_completion_length": 5},
    "further options": {"generation_kwargs": {"frequency_penalty": 0.5, "temperature": 0.5, "stop_token_ids": [65]}},
    "a regex": {"structured_outputs_regex": "[ab]{3}"},
    "a regex in a dict": {"generation_kwargs": {"structured_outputs": {"regex": "[cd]{3}"}}},
    "two of them": {
        "structured_outputs_regex": "[ab]{3}",
        "generation_kwargs": {"structured_outputs": {"regex": "[cd]{3}"}},
    },
}


@pytest.mark.parametrize("case", ASKED)
def test_samples_are_trls(sampler, case):
    """Bit for bit, from the same engine in the same random state; other settings have other samples."""
    faces = shown(sampler, **ASKED[case]), trls(sampler, **ASKED[case]), shown(sampler)
    ways, found = (QuantGeneration.generate, VLLMGeneration.generate, QuantGeneration.generate), []
    for face, generate in zip(faces, ways, strict=True):
        torch.manual_seed(5)
        sampler.llm.reset_prefix_cache()
        found.append(generate(face, PROMPTS, None, 4))
    assert found[0] == found[1] and len(found[0][1]) == len(PROMPTS)
    assert (found[0] == found[2]) == (case == "nothing")


def test_images_are_placed_as_they_are_scored(tmp_path, monkeypatch):
    """By itself vLLM writes BLIP-2's image tokens before a prompt, also where the prompt already has them."""
    path = save_tiny_vision(tmp_path / "model")
    model = Blip2ForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16)
    sampler = engine(model, "bf16", max_model_length=256, max_completion_length=4)
    sampler.sync()
    image, written, picture = model.config.image_token_index, model.config.num_query_tokens, Image.new("RGB", (28, 28))
    prompts = [[5, 6], [5, *[image] * written, 6]]
    found = QuantGeneration.generate(shown(sampler), prompts, [None, [picture]], 1)
    assert [len(ids) for ids in found[1]] == [24, 24] and found[0] == prompts
    monkeypatch.setattr(VLLMEngine, "image_token", None)
    message = f"prompt 1 has {written + 2} tokens, and vLLM made {2 * written + 2} of it.* `image_token_id`"
    with pytest.raises(RuntimeError, match=message):
        QuantGeneration.generate(shown(sampler), prompts, [None, [picture]], 1)


def test_vllm_gets_each_image_once_and_places_it_as_given():
    """It replaces a token of each image by as many as the image has features, in their order."""
    image, start, end, sizes = 9, 7, 8, [4, 1, 3]
    prompt = [5]
    for size in sizes:
        prompt += [start, *[image] * size, end, 6, 6]
    asked = []

    def render(prompts, *args):
        asked.extend(prompts)
        places = [PlaceholderRange(0, size) for size in sizes]  # wherever it puts them
        return [{"prompt_token_ids": [1], "mm_placeholders": {"image": places}} for _ in prompts]

    requests = [Request(prompt, images=[object()] * 3, sampled=[image, 3])]
    (found,) = at_their_places(render, iter(requests), image)([vllm_prompt(requests[0])])
    once = [5, *[start, image, end, 6, 6] * 3]
    assert asked[0]["prompt_token_ids"] == [*once, image, 3] and found["prompt_token_ids"] == requests[0].given
    places = [(one.offset, one.length) for one in found["mm_placeholders"]["image"]]
    assert [prompt[offset : offset + length] for offset, length in places] == [[image] * size for size in sizes]
    assert vllm_prompt(Request(prompt)) == {"prompt_token_ids": prompt}


def test_an_engine_is_started_as_trl_starts_it(tmp_path, monkeypatch):
    """But for its precision, and for sleep, which our engine enters by itself."""
    import trl.generation.vllm_generation as vllm_generation

    class Told(Exception):
        pass

    def record(*args, **arguments):
        raise Told(arguments)

    monkeypatch.setattr(vllm, "LLM", record)
    monkeypatch.setattr(vllm_generation, "LLM", record)
    settings = {"gpu_memory_utilization": 0.2, "max_model_length": 300, "max_num_seqs": 5}
    model, told = policy(tmp_path / "policy"), []
    for build in (lambda *a, **k: VLLMEngine(*a, precision="bf16", **k), VLLMGeneration):
        with pytest.raises(Told) as raised:
            build(model, Accelerator(cpu=True), tiny_tokenizer(), **settings)
        told.append(raised.value.args[0])
    ours, theirs = told
    assert theirs == {name: ours[name] for name in theirs} and theirs["max_model_len"] == 300
    assert set(ours) - set(theirs) <= {"dtype"}


def test_a_mixture_gets_the_kernels_of_its_precision(tmp_path, monkeypatch):
    """But for those that the run asks for. A dense model, and other precisions, leave the choice to vLLM."""
    told = []

    def record(*args, **arguments):
        told.append(arguments.get("moe_backend"))
        raise ConnectionError("told")

    monkeypatch.setattr(vllm, "LLM", record)
    for check in ("engine.check_device", "base.check_experts_here"):
        monkeypatch.setattr(f"trl_quant.rollout.vllm.{check}", lambda *args, **kwargs: None)
    asked = {"moe_backend": "cutlass"}
    for family, precision, given in (
        ("qwen3_moe", "fp8", {}),
        ("qwen3_moe", "fp8", asked),
        ("qwen3_moe", "bf16", {}),
        ("qwen3", "fp8", {}),
    ):
        model = policy(tmp_path / family, family=family)
        with pytest.raises(ConnectionError, match="told"):
            VLLMEngine(model, Accelerator(cpu=True), tiny_tokenizer(), precision=precision, engine_kwargs=given)
    assert told == ["triton", "cutlass", None, None]


# A server


class Asked:
    """In place of the client of a server. It answers each prompt with its own last token."""

    def __init__(self):
        self.calls = []

    def image_features(self, images):
        self.calls.append(copy.deepcopy(images))
        return [row and {"data": len(row), "mm_placeholders": {"image": [None] * len(row)}} for row in images]

    def generate(self, prompts, n=1, **given):
        self.calls.append(given | {"prompts": prompts, "n": n})
        ids = [[prompt[-1], EOS] for prompt in prompts for _ in range(n)]
        logps = [[[-float(place)], [-1.0]] for place in range(len(ids))]
        tokens = [[[token] for token in row] for row in ids]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logps, "logprob_token_ids": tokens}


@pytest.fixture
def served(monkeypatch) -> VLLMServerEngine:
    monkeypatch.setattr(VLLMServerEngine, "start", lambda self: None)
    processor, policy = SimpleNamespace(tokenizer=tiny_tokenizer(), image_token_id=9), tiny_model()
    policy.config.image_token_id = 9
    built = VLLMServerEngine(policy, Accelerator(cpu=True), processor, mode="server", precision="bf16")
    built.is_current, built.sync_check_steps, built.vllm_client = True, 0, Asked()
    return built


IMAGES = [["red", "blue"], ["red", "blue"], None, None]


@pytest.mark.parametrize("images", [None, IMAGES], ids=["text", "images"])
@pytest.mark.parametrize("case", ASKED)
def test_a_server_is_asked_as_trl_asks_it(served, case, images):
    """Once for each prompt and its copies; the answers come back in the order of the requests."""
    prompts, found = [[9, 9, 5, 9, 6]] * 2 + [[7, 8]] * 2, []
    faces = shown(served, mode="server", **ASKED[case]), trls(served, mode="server", **ASKED[case])
    for face, generate in zip(faces, (QuantGeneration.generate, VLLMGeneration.generate), strict=True):
        found.append((generate(face, prompts, images, 2)[1:], served.vllm_client.calls))
        served.vllm_client.calls = []
    assert found[0] == found[1]
    (_, logps, _), calls = found[0]
    assert [row[0][0] for row in logps] == [0, -1, -2, -3] and calls[-1]["prompts"] == [prompts[0], prompts[2]]
    if images is not None:
        assert calls[0] == [IMAGES[0], None]
        assert calls[1]["features"][0]["mm_placeholders"]["image"] == [
            {"offset": 0, "length": 2},
            {"offset": 3, "length": 1},
        ]


def test_prompts_and_images_must_agree(served):
    with pytest.raises(ValueError, match=r"has 1 runs of image tokens for 2 images"):
        served.sample(requests_for([[9, 9, 5]], [["red", "blue"]]))
    assert placed(None, [9], 9) is None


class Apart(Asked):
    """Requests of their own are answered in the same way. The last one is not whole when they are ended."""

    base_url, session = "http://server", requests.Session()

    def named(self, name, adapter, is_ending):
        one = copy.copy(self)
        one.is_ending, one.was_ended = is_ending, False
        return one

    def generate_unguarded(self, prompts, features, n, logprobs, **given):
        self.was_ended = prompts[0][-1] == 4 and self.is_ending.wait(5)
        return self.generate(prompts, n, features=features, **given)

    def end(self, names):
        pass

    def require_token(self):
        self.calls.append("token")


def test_a_server_is_asked_for_each_completion_that_may_end_early(served):
    """With the limits of the rest, the images of the prompt, and the seed of its copy."""
    served.vllm_client = Apart()
    options = {"max_tokens": 7, "min_tokens": 2, "seed": 3, "temperature": 0.5}
    served.settings = replace(served.settings, generation_kwargs=options, min_p=0.25)
    prompt, flags = [9, 5, 9, 6], []
    pair = [Request(prompt, ["red", "blue"], 2, sampled) for sampled in ([9, 7, 8], [4])]
    samples = served.sample([*pair, Request([1, 2])], lambda ended: flags.append(ended) or sum(ended) == 2)
    assert samples.ended == [True, False, True] == flags[-1] and all(sum(ended) < 2 for ended in flags[:-1])
    assert samples.token_ids == [[8, EOS], [4, EOS], [2, EOS]] and samples.logps == [[0, -1]] * 3
    images, *calls, token = served.vllm_client.calls
    assert images == [["red", "blue"], None] and token == "token"  # both once
    calls = sorted(calls, key=lambda call: len(call["prompts"][0]))
    assert [call["prompts"] for call in calls] == [[[1, 2]], [[*prompt, 4]], [[*prompt, 9, 7, 8]]]
    sent = [call["generation_kwargs"] for call in calls]
    assert [[own[name] for name in ("max_tokens", "min_tokens", "seed")] for own in sent] == [
        [7, 2, 3],
        [6, 1, 4],
        [4, 0, 3],
    ]
    assert all(call["n"] == 1 and call["min_p"] == 0.25 and own["temperature"] == 0.5 for call, own in zip(calls, sent))
    places = [{"offset": 0, "length": 1}, {"offset": 2, "length": 1}]  # the token 9 that was sampled is no image
    assert [call["features"][0] and call["features"][0]["mm_placeholders"]["image"] for call in calls] == [
        None,
        places,
        places,
    ]


def test_a_server_is_asked_about_the_requests_of_all_ranks(served, monkeypatch):
    """`enough` sees them in the order of the ranks, and each rank gets its own samples."""
    served.vllm_client, others = Apart(), [Request([1, 3], sampled=[7]), Request([1, 4])]
    monkeypatch.setattr(vllm_server, "gather_object", lambda given: [*([2] if given == [1] else others), *given])
    flags = []
    for rank, token in ((1, 6), (0, 7)):
        served.accelerator = SimpleNamespace(is_main_process=True, process_index=rank)
        samples = served.sample([Request([5, 6])], lambda ended: flags.append(ended) or sum(ended) == 2)
        assert samples == Samples([[token, EOS]], [[0, -1]], [True]) and flags[-1] == [True, False, True]


def test_the_main_process_alone_asks_a_server(served, monkeypatch):
    """Beside a training, whose ranks meanwhile wait for each other elsewhere."""
    served.vllm_client, served.main_samples = Apart(), True
    for name in ("gather_object", "broadcast_object_list"):
        monkeypatch.setattr(vllm_server, name, lambda *args, **given: pytest.fail("asked other ranks"))
    samples = served.sample([Request([5, 6]), Request([1, 3])], lambda ended: False)
    assert samples.token_ids == [[6, EOS], [3, EOS]]


def test_a_server_goes_on_without_an_early_end(served):
    served.vllm_client = Apart()
    samples = served.sample([Request([9, 5], sampled=[7]), Request([6])])
    assert samples == Samples([[7, EOS], [6, EOS]], [[0, -1]] * 2)
