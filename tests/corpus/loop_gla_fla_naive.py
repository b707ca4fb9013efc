"""fla's naive_recurrent_gla: [B, H, T, D], the output written in place, the state without."""

import torch

EXPECTED = {"families": ["per channel"]}
LOCAL_LENGTHS, MORE_LOCAL_LENGTHS = (3,), (5,)


def naive_recurrent_gla(q, k, v, gk):
    dtype = q.dtype
    q, k, v, gk = (x.transpose(1, 2) for x in (q, k, v, gk))
    B, H, T, K, V = *q.shape, v.shape[-1]
    o = torch.zeros_like(v)
    scale = K**-0.5
    h = q.new_zeros(B, H, K, V)
    for i in range(T):
        q_i = q[:, :, i] * scale
        k_i = k[:, :, i]
        v_i = v[:, :, i]
        gk_i = gk[:, :, i].exp()
        kv_i = k_i[..., None] * v_i[..., None, :]
        h = h * gk_i[..., None] + kv_i
        o[:, :, i] = (q_i[..., None] * h).sum(-2)
    return o.transpose(1, 2).to(dtype)


def make_model():
    return naive_recurrent_gla


def make_inputs(batch, length, dtype):
    q, k = (torch.randn(batch, length, 3, 4, dtype=dtype) for _ in range(2))
    return (
        q,
        k,
        torch.randn(batch, length, 3, 5, dtype=dtype),
        -0.2 * torch.rand(batch, length, 3, 4, dtype=dtype),
    )
