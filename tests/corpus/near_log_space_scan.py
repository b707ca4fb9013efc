"""minGRU's parallel form in log space: a cumulative logsumexp of log coefficients and log values."""

import torch
from torch import nn

EXPECTED = {"refused": r"near_log_space_scan\.py"}
LOCAL_LENGTHS = (5,)


class Model(nn.Module):
    def forward(self, log_coeffs, log_values):
        a_star = log_coeffs.cumsum(dim=1)
        log_h0_plus_b_star = (log_values - a_star).logcumsumexp(dim=1)
        return (a_star + log_h0_plus_b_star).exp()


def make_model():
    return Model()


def make_inputs(batch, length, dtype):
    return -0.3 * torch.rand(batch, length, 4, dtype=dtype), torch.randn(batch, length, 4, dtype=dtype)
