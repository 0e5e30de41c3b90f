"""An engine as a test writes it: the protocol in ten lines."""

import torch

from trl_quant.rollout.engine import Samples


class MadeUp:
    """Samples letters with a probability of its own, whatever the policy."""

    def __init__(self):
        self.syncs, self.random = 0, torch.Generator().manual_seed(0)

    def sync(self):
        self.syncs += 1

    def sample(self, requests):
        ids = torch.randint(64, 90, (len(requests), 5), generator=self.random).tolist()
        return Samples(ids, [[-3.25] * 5 for _ in ids])
