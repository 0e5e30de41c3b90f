"""The fingerprint of a policy's weights: what it must see, and its kernel against its twin."""

from math import isqrt

import pytest
import torch
from interpreter import on_devices
from made_up_experts import MadeUpMixture

from trl_quant.rollout.fingerprint import checksum, fingerprint, whole_words


kernels = pytest.importorskip("trl_quant.kernels.checksum")

MASK = 2**64 - 1


def by_hand(words: list[int]) -> int:
    """The docstring's sum, with Python's integers."""
    golden = (isqrt(5 << 128) - (1 << 64)) // 2  # 2^64 (sqrt(5) - 1) / 2
    fold = lambda x: x ^ (x >> 31)  # noqa: E731
    total = sum(fold(x & MASK) * (fold(i * golden & MASK) | 1) for i, x in enumerate(words, 1)) & MASK
    return total - 2**64 if total >> 63 else total


def words_of(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


@pytest.mark.parametrize("count", [0, 1, 5, 70_000])  # the last in two parts
def test_checksum_by_hand(count):
    words = words_of(count)
    assert checksum(words).item() == by_hand(words.tolist())


@on_devices
def test_kernel_equals_its_twin(device):
    """Of tensors of every size: none, less than a tile, many tiles, and more tiles than programs."""
    sizes = [1, 0, 3, kernels.TILE, kernels.TILE + 1, 0, 5 * kernels.TILE - 1, 2]
    if device == "cuda":
        sizes += [(3 * kernels.PROGRAMS + 1) * kernels.TILE + 7, 11]
    tensors = [words_of(size, seed) for seed, size in enumerate(sizes)]
    sums = kernels.checksums([tensor.to(device) for tensor in tensors])
    assert sums.tolist() == [checksum(tensor).item() for tensor in tensors]
    assert sums.tolist() == kernels.checksums([tensor.to(device) for tensor in tensors]).tolist()


@on_devices
def test_kernel_reads_no_further_than_a_tensor(device):
    """Whatever lies behind it in memory."""
    words = words_of(100).to(device)
    (before,) = kernels.checksums([words[:40]]).tolist()
    words[40:] = 7
    assert kernels.checksums([words[:40]]).tolist() == [before] == [checksum(words[:40].cpu()).item()]


@on_devices
def test_kernel_reads_experts_as_one_row_of_words(device):
    """Whole words or not: 6 experts of 15 x 7 values in BF16 end within a word."""
    for sizes in ({}, {"experts": 6, "hidden": 7, "intermediate": 15}):
        params = [whole_words(param.detach()) for param in MadeUpMixture(**sizes).mlp["experts"].parameters()]
        words = [param.flatten().view(torch.int64) for param in params]
        sums = kernels.checksums([param.to(device) for param in params])
        assert sums.tolist() == [by_hand(row.tolist()) for row in words]


EDITS = {
    "one row negated": lambda w: w[3].neg_(),
    "one column negated": lambda w: w[:, 3].neg_(),
    "all negated": lambda w: w.neg_(),
    "two rows exchanged": lambda w: w.copy_(w[[0, 5, 2, 3, 4, 1, *range(6, len(w))]]),
    "rows shifted": lambda w: w.copy_(w.roll(1, 0)),
    "columns reversed": lambda w: w.copy_(w.flip(1)),
    "transposed": lambda w: w.copy_(w.T.clone()),
    "zeros": lambda w: w.zero_(),
    "a constant": lambda w: w.fill_(0.5),
    "the sign of one number": lambda w: w[7, 7].neg_(),
    "the last bit of one number": lambda w: w.view(torch.int16)[-1, -1].bitwise_xor_(1),
    "the last bits of a row": lambda w: w.view(torch.int16)[2].bitwise_xor_(1),
    "doubled": lambda w: w.mul_(2),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("size", [64, 63])  # whole words in each row, and not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_edits(edit, size, dtype):
    """Every edit shows, and what undoes it too."""
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.LayerNorm(size)).to(dtype)
    before, saved = fingerprint(model), model[0].weight.data.clone()
    assert fingerprint(model) == before
    EDITS[edit](model[0].weight.data)
    assert fingerprint(model) != before
    model[0].weight.data.copy_(saved)
    assert fingerprint(model) == before


EDITS_OF_EXPERTS = {
    "two experts exchanged": lambda w: w.copy_(w[[0, 2, 1]]),
    "an expert overwritten with another": lambda w: w[1].copy_(w[2]),
    "an expert of zeros": lambda w: w[1].zero_(),
    "an expert negated": lambda w: w[2].neg_(),
    "gate and up exchanged": lambda w: w.copy_(w.roll(w.shape[1] // 2, 1)),
    "experts and rows exchanged": lambda w: w.copy_(w.mT.reshape(w.shape)),
    "the last bit of one number": lambda w: w.view(torch.int16)[2, -1, -1].bitwise_xor_(1),
}


@pytest.mark.parametrize("edit", EDITS_OF_EXPERTS)
@pytest.mark.parametrize("hidden", [192, 7])  # whole words in each row, and not
def test_edits_of_experts(edit, hidden):
    model = MadeUpMixture(hidden=hidden)
    for weight in (param.data for param in model.mlp["experts"].parameters()):
        before, saved = fingerprint(model), weight.clone()
        EDITS_OF_EXPERTS[edit](weight)
        assert fingerprint(model) != before
        weight.copy_(saved)
        assert fingerprint(model) == before


def test_the_tree():
    """Modules that are exchanged, shared or renamed, and parameters that are tied or of another type."""

    def build():
        torch.manual_seed(0)
        return torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in "abc"})

    def exchanged(model):
        model["a"], model["b"] = model["b"], model["a"]

    def shared(model):
        model["a"] = model["b"]

    def renamed(model):
        model["d"] = model.pop("c")

    def tied(model):
        model["a"].weight = model["b"].weight

    def equal(model):
        model["a"].weight.data.copy_(model["b"].weight)

    def wider(model):
        model["c"].double()

    changes = (exchanged, shared, renamed, tied, equal, wider, lambda model: None)
    models = [build() for _ in changes]
    for change, model in zip(changes, models, strict=True):
        change(model)
    assert len({fingerprint(model) for model in models}) == len(changes)
    assert fingerprint(models[-1]) == fingerprint(build())
