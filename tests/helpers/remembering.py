"""An FP32 engine that keeps the weights of each sync, and trainers that sample from it with partial rollouts."""

from pathlib import Path

import torch
from tiny import tiny_model
from torch.nn.utils.rnn import pad_sequence
from training import trainer_for

from trl_quant.rollout.engine import Samples
from trl_quant.storage.run_checkpoints import POOL_NAME


END = 13  # a completion ends with a token that this number divides


class Remembering:
    """
    Samples token by token, all rows at once, from a copy of the policy, and keeps all copies: `versions[g]` sampled in
    generation g, and `starts` has the prompts of all requests without tokens, in their order.
    """

    def __init__(self, trainer, policy, longest: int):
        self.trainer, self.policy, self.longest = trainer, policy, longest
        self.copy, self.versions, self.starts = None, {}, []

    def sync(self):
        self.copy = tiny_model().eval()  # a copy of TRL's would compute with its `forward`
        self.copy.load_state_dict(self.policy.state_dict())

    def sample(self, requests, enough=None):
        if self.trainer.pool is not None and self.trainer.model.training:
            self.versions[self.trainer.pool.generation] = self.copy
        self.starts += [tuple(request.prompt) for request in requests if not request.sampled]
        ids, logps = [[] for _ in requests], [[] for _ in requests]
        ended = [False] * len(requests)
        while not all(ended) and not (enough is not None and enough(ended)):
            rows = [i for i, over in enumerate(ended) if not over]
            given = [torch.tensor(requests[i].given + ids[i]) for i in rows]
            with torch.no_grad():  # no token sees the padding, which stands after it
                logits = self.copy(pad_sequence(given, batch_first=True)).logits
            scores = logits[range(len(rows)), [len(row) - 1 for row in given]].log_softmax(-1)
            for i, row, token in zip(rows, scores, torch.multinomial(scores.exp(), 1).flatten().tolist(), strict=True):
                ids[i].append(token)
                logps[i].append(row[token].item())
                ended[i] = token % END == 0 or len(requests[i].sampled) + len(ids[i]) == self.longest
        return Samples(ids, logps, ended)


def remembering(kind: type) -> type:
    """The trainer, which samples from [`Remembering`]."""

    class Sampling(kind):
        def build_engine(self, spec, model, accelerator, processing_class, **settings):
            self.memory = Remembering(self, model, settings["max_completion_length"])
            return self.memory

    return Sampling


def partial_run(path, kind, rollouts_in_flight=2.0, **given):
    """Two groups, or four completions, a generation; weights that move visibly at each step."""
    settings = {
        "rollout_precision": "bf16",
        "rollouts_in_flight": rollouts_in_flight,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 12,
        "max_steps": 4,
        "learning_rate": 0.02,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }
    return trainer_for(path, kind=remembering(kind), **settings | given)


def returned(trainer) -> list[tuple]:
    """
    The list to which the trainer will add each completion that its pool returns: the prompt's token ids, the
    completion's, and the generations that sampled these.
    """
    rows, score = [], trainer._generate_and_score_completions

    def scored(inputs):
        generation, batch = trainer.pool.generation, score(inputs)
        parts = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "ages")
        for prompt, given, ids, sampled, ages in zip(*(batch[name] for name in parts), strict=True):
            given, sampled = given.bool(), sampled.bool()
            rows.append((prompt[given].tolist(), ids[sampled].tolist(), (generation - ages[sampled]).tolist()))
        return batch

    trainer._generate_and_score_completions = scored
    return rows


def in_flight(checkpoint: Path) -> list[dict]:
    """The groups in flight that a checkpoint holds."""
    return torch.load(checkpoint / POOL_NAME, weights_only=True)["groups"]


def assert_goes_on(groups: list[dict], rows: list[tuple]) -> None:
    """Each completion in flight begins one that was returned for its prompt, with its versions; some have tokens."""
    count = 0
    for group in groups:
        for completion in group["completions"]:
            ids, versions = completion["token_ids"].tolist(), completion["versions"].tolist()
            own = [(found[: len(ids)], by[: len(ids)]) for prompt, found, by in rows if list(prompt) == group["prompt"]]
            assert (ids, versions) in own
            count += len(ids)
    assert count > 0
