"""What the executors on top of the flash-attention packages have to get right, whichever package it is."""

from __future__ import annotations

from support import cudnn_checks
from support.cudnn_checks import allowed_of, hold, inputs_of, plan_of, trained
from support.reference import attend

from attnroute import masks

ADVERSARIAL = (0.0, 12.0)
"""As that of `cudnn_checks`, within what a log-sum-exp in float32 can say: weights are made from it."""
NEGATIVE = (
    "causal from the top left",
    "window from the top left",
    "one query, top left",
)
"""Cases whose window has a negative side from the bottom right, which the tables rule out."""

PADDED = {n: case for n, case in cudnn_checks.PADDED.items() if n not in NEGATIVE} | {
    "more queries, causal": (masks.Causal("bottom_right"), 9, 5),
    "more queries, window": (masks.Window(2, 1, "bottom_right"), 9, 5),
    "more queries, wide at the right": (masks.Window(1, 6, "bottom_right"), 9, 5),
    "more queries, open at the right": (masks.Window(2, None, "bottom_right"), 9, 5),
    "more queries, open at the left": (masks.Window(None, 6, "bottom_right"), 9, 5),
    "wider than everything": (masks.Window(40, 50, "bottom_right"), 6, 9),
    "as wide as everything": (masks.Window(8, 5, "bottom_right"), 6, 9),
    "nearly as wide": (masks.Window(7, 4, "bottom_right"), 6, 9),
    "batch of one": (masks.Causal("bottom_right"), 3, 130),
}
"""Mask, seqlen_q and seqlen_kv."""

SIDES = {
    "everything": ((None, None), (5, 7), (-1, -1)),
    "causal": ((None, 0), (5, 7), (-1, 0)),
    "causal, one query": ((None, 0), (1, 7), (-1, -1)),
    "window, one query": ((3, 0), (1, 7), (3, -1)),
    "window": ((3, 2), (7, 7), (3, 2)),
    "the window of a model": ((4095, 0), (5000, 5000), (4095, 0)),
    "the diagonal alone": ((0, 0), (5, 7), (0, 0)),
    "wide at the left": ((6, 0), (5, 7), (-1, 0)),
    "nearly wide at the left": ((5, 0), (5, 7), (5, 0)),
    "wide at the right": ((2, 4), (5, 7), (2, -1)),
    "nearly wide at the right": ((2, 3), (5, 7), (2, 3)),
    "open at the left": ((None, 2), (5, 7), (-1, 2)),
    "open at the right": ((1, None), (5, 7), (1, -1)),
}
"""Left and right of a request, seqlen_q and seqlen_kv, and what the package is given."""


def check_scores(executor, backend, mask, lengths, *, alibi_slopes=None, softcap=0.0, **settings):
    """Run one call with a softcap or ALiBi, forward and backward, and hold it against the definition."""
    inputs = inputs_of(mask, *lengths, softcap=softcap, alibi_slopes=alibi_slopes)
    found = executor.run(inputs, plan_of(backend, **settings))
    given = {"allowed": allowed_of(mask, inputs), "softcap": softcap, "alibi_slopes": alibi_slopes}
    want = attend(inputs.query, inputs.key, inputs.value, **given)
    hold(found, want, trained(inputs))
    return inputs
