"""What the Triton kernels of preparations compute, in float64 on the CPU, in the place of their launches."""

from __future__ import annotations

import math

import torch

from attnroute.executors.prepare import clear, sink
from attnroute.executors.prepare.kernels import CLEAR, GRADIENT, SHRINK


class Standins:
    """Put in the place of `Prebound`; the names of the kernels that would be launched are in `seen`."""

    def __init__(self, monkeypatch):
        self.seen = []
        for module in (sink, clear):
            monkeypatch.setattr(module, "compiles_for", lambda _: True)
            monkeypatch.setattr(module, "Prebound", self.prebound)

    def prebound(self, kernel):
        name, function = next((n, f) for k, n, f in _KERNELS if k is kernel)

        def launch(*tensors):
            assert kernel.kind(*tensors) is not None
            self.seen.append(name)
            function(*[t.detach().data for t in tensors])
            return True

        return launch


def rows_of(lse, out):
    """Return a log-sum-exp as (batch, heads, seqlen_q), a view."""
    return lse.view(lse.shape[:3])[:, :, : out.shape[2]]


def shares(out, lse, sink):
    """Return the share that keys keep, and the log-sum-exp with the sink, in float64."""
    lse, logit = rows_of(lse, out).double(), sink.double()[:, None]
    both = torch.logaddexp(lse, logit.expand_as(lse))
    return torch.sigmoid(lse - logit).nan_to_num(0.0), torch.where(both.isinf(), math.inf, both)


def shrink(out, lse, sink, *, trains=False):
    share, both = shares(out, lse, sink)
    out.copy_(out.double() * share[..., None])
    if trains:
        rows_of(lse, out).copy_(both)


def gradient(grad, out, lse, sink, into):
    share = torch.exp(sink.double()[:, None] - rows_of(lse, out).double())
    found = -(share[..., None] * out.double() * grad.double()).sum((0, 2, 3))
    into.zero_()
    (into if into.dim() == 1 else into[0]).copy_(found)


def zeros(key, value, made_key, made_value, keep):
    for source, made in ((key, made_key), (value, made_value)):
        made.copy_(torch.where(keep, source, 0.0))


_KERNELS = (
    (SHRINK[False], "shrink", shrink),
    (SHRINK[True], "shrink and lse", lambda *tensors: shrink(*tensors, trains=True)),
    (GRADIENT, "sink gradient", gradient),
    (CLEAR, "clear", zeros),
)
