"""A tiny masked diffusion policy, its tokenizer and short runs of `DiffusionGRPOTrainer` for the tests."""

from contextlib import contextmanager

import torch
from tiny import tiny_model, tiny_tokenizer
from training import config, make

from trl_quant import DiffusionGRPOConfig, DiffusionGRPOTrainer
from trl_quant.policy.masked import MaskedRows


MASK = "<|reserved_0|>"
MASK_ID = 259
LENGTH = 8  # of the canvas, as `training.config` has it


def policy(family="llama", ends=(), **settings):
    """A bidirectional model. `ends` are further tokens that end a completion, so that lengths differ."""
    model = tiny_model(family, **{"is_causal": False, "seed": 3} | settings)
    model.generation_config.eos_token_id = [257, *ends]
    return model


def tokenizer():
    masking = tiny_tokenizer()
    masking.add_special_tokens({"mask_token": MASK})
    return masking


def arguments(path, **settings):
    return config(DiffusionGRPOConfig, path, **{"block_length": 4, "max_steps": 2} | settings)


def trainer(path, trainer_class=DiffusionGRPOTrainer, model=None, given=None, **settings):
    given = {"processing_class": tokenizer()} | (given or {})
    return make(trainer_class, arguments(path, **settings), model=policy() if model is None else model, **given)


@contextmanager
def canvases():
    """Every row that a model with the fused head computes meanwhile: (model, draw, tokens without padding)."""
    seen, call = [], MaskedRows.__call__

    def noting(self, input_ids, attention_mask, labels, **kwargs):
        model = self.model

        def noted(input_ids, attention_mask, **inputs):
            for ids, kept in zip(input_ids, attention_mask.bool(), strict=True):
                seen.append((model, self.draw, tuple(ids[kept].tolist())))
            return model(input_ids=input_ids, attention_mask=attention_mask, **inputs)

        self.model = noted
        try:
            return call(self, input_ids, attention_mask, labels, **kwargs)
        finally:
            self.model = model

    MaskedRows.__call__ = noting
    try:
        yield seen
    finally:
        MaskedRows.__call__ = call


def uneven_rows(seed=0, rows=5, longest=6):
    """Prompts and completions of different lengths, of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randint(0, 256, (length,), generator=generator).tolist()

    return [draw(2 + 3 * row % 7) for row in range(rows)], [draw(1 + 2 * row % longest) for row in range(rows)]
