"""A change of the scores within the library's kernels, forward and backward."""

import torch
from course import check, normal

from channels.compat import gl
from gluon_attn import ScoreMod, attention, jit
from gluon_attn.device import Device


@jit
def capped(score, q_index, k_index, head, batch, CAP: gl.constexpr):
    return score / (1 + gl.abs(score) / CAP)


@jit
def gradient(dscore, score, modified, q_index, k_index, head, batch, CAP: gl.constexpr):
    slope = 1 / (1 + gl.abs(score) / CAP)
    return dscore * slope * slope


CAPPED = ScoreMod(capped, gradient, constants=(5,))


def reference(q, k, v):
    score = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(score / (1 + score.abs() / 5), -1) @ v


def checked() -> None:
    q, k, v, dout = (3 * normal(4, 1, 1, 128, 64)).unbind()
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    theirs = [t.float().requires_grad_() for t in (q, k, v)]
    out = attention(*ours, score_mod=CAPPED, device=Device.hopper())
    want = reference(*theirs)
    torch.testing.assert_close(out.float(), want, atol=5e-2, rtol=5e-2)
    out.backward(dout)
    want.backward(dout.float())
    for got, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.grad.float(), right.grad, atol=0.02 * right.grad.abs().max().item(), rtol=0)


def main() -> None:
    check(checked, "capped scores, forward and backward", schedules=2)


if __name__ == "__main__":
    main()
