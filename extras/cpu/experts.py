"""The experts of a mixture (extras/experts), of which few_rows.cpp computes those that are chosen."""

import torch

from extras.cpu import few_rows
from extras.experts import Experts


class FewRowsExperts(Experts):
    """Experts on a CPU, in bfloat16 or Packed: few_rows.cpp reads the weights of those that are chosen, once."""

    def forward(self, x, chosen):
        matrices = self.w1, self.w3, self.w2
        weights, bits = [w.weight for w in matrices], [getattr(w, "bits", 16) for w in matrices]
        if bits == [16] * 3 and chosen.numel() > few_rows.FEW * len(weights[0]):
            return super().forward(x, chosen)
        return torch.ops.ladder.few_rows_experts(x, chosen, *weights, self.w2.in_features, x.shape[1], bits)
