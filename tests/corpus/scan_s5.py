"""S5: an associative scan over pairs of complex poles and inputs, the poles the same at every token."""

import torch
from torch import nn
from torch._higher_order_ops import associative_scan

EXPECTED = {"families": ["complex"]}
LOCAL_LENGTHS = (5,)


class S5(nn.Module):
    def __init__(self, width=4, state=3):
        super().__init__()
        self.log_real = nn.Parameter(torch.randn(state) / 3)
        self.imag = nn.Parameter(3 * torch.randn(state))
        self.log_step = nn.Parameter(torch.rand(state) - 2)
        self.B = nn.Parameter(torch.randn(state, width, dtype=torch.cfloat))
        self.C = nn.Parameter(torch.randn(width, state, dtype=torch.cfloat))

    def forward(self, u):
        Lambda = torch.complex(-torch.exp(self.log_real), self.imag)
        Lambda_bar = torch.exp(Lambda * torch.exp(self.log_step))
        B_bar = ((Lambda_bar - 1) / Lambda)[:, None] * self.B
        Bu = torch.einsum("pd,btd->btp", B_bar, u.to(B_bar.dtype))

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        poles = Lambda_bar.repeat(u.shape[1], 1).expand(u.shape[0], -1, -1)
        x = associative_scan(combine, (poles, Bu), dim=1, combine_mode="generic")[1]
        return 2 * (x @ self.C.T).real


def make_model():
    return S5()


def make_inputs(batch, length, dtype):
    return torch.randn(batch, length, 4, dtype=dtype)
