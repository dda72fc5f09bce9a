"""Deep combinations of masks: work in proportion to the depth, a sentence where it is unreasonable."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from pydantic import ValidationError

import attnroute
from attnroute import masks
from attnroute.cli import main
from attnroute.errors import ArgumentError
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.question.nodes import AnyNode, CausalNode, NotNode
from attnroute.vocabulary import MASK_DEPTH

HOST = Host(arch="cpu", versions={"torch": "2.13.0+cpu", "c++": "12", "avx2": "present"})
LINE = "fp32 b1 hq2 sq8 d8 "
FORMS = ["not({})", "any({})", "any({}|causal)", "not(causal+{})", "any(window=3,0+{}|keys=3)"]
OBJECTS = {
    "not": masks.Not,
    "any": lambda inner: masks.Either((inner,)),
    "tilde": lambda inner: ~(inner & masks.Window(2, 1)),
    "either": lambda inner: (inner | masks.KeyPadding(lengths=[3])) & masks.Window(5, 0),
}


def nested(form, depth):
    word = "causal"
    for _ in range(depth):
        word = form.replace("{}", word)
    return word


@pytest.mark.parametrize("form", FORMS)
def test_a_deep_line_is_decided(form):
    """Were the work doubled at each level, this would not end."""
    call = parse(LINE + nested(form, MASK_DEPTH))
    decision = attnroute.decide(call, HOST, advise=True)
    assert decision.selected is not None
    assert parse(render(call)) == call
    assert Call.model_validate_json(call.model_dump_json()) == call


@pytest.mark.parametrize("depth", [MASK_DEPTH + 1, 500, 900, 20_000])
@pytest.mark.parametrize("form", FORMS)
def test_an_unreasonable_line_is_a_sentence(form, depth, capsys):
    line = LINE + nested(form, min(depth, 2000))
    with pytest.raises(ArgumentError, match=f"mask requires combinations at most {MASK_DEPTH} deep; got"):
        parse(line)
    assert main(["explain", line, "--arch", "cpu"]) == ArgumentError.exit_code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("form", ["not(" * 5000, "causal" + ")" * 5000, "any(" * 70 + ")" * 70, "(" * 300])
def test_parentheses_without_end(form, capsys):
    assert main(["explain", LINE + form, "--arch", "cpu"]) == ArgumentError.exit_code
    assert main(["explain", LINE, "--mask", form, "--arch", "cpu"]) == ArgumentError.exit_code
    assert len(capsys.readouterr().err) < 1000


@pytest.mark.parametrize("name", OBJECTS)
def test_a_deep_object_is_computed(name):
    torch.manual_seed(0)
    mask, depth = masks.Causal(), 0
    while depth < MASK_DEPTH - 2:
        mask, depth = OBJECTS[name](mask), depth + (2 if name in ("tilde", "either") else 1)
    query, key, value = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    allowed = mask.materialize(8, 8)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    truth = torch.where(allowed.any(-1, keepdim=True), plain, 0.0)
    for backend in ("chunked", "math"):
        out = attnroute.attention(query, key, value, mask, backend=backend)
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)
        out.sum().backward()
    assert hash(mask) == hash(mask)
    assert repr(mask)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_unreasonable_object_is_a_sentence(name):
    with pytest.raises(ArgumentError, match=f"at most {MASK_DEPTH} deep"):
        reduce(lambda mask, _: OBJECTS[name](mask), range(900), masks.Causal())


def test_what_is_joined_flat_is_not_deep():
    mask = masks.Causal()
    for length in range(300):
        mask = mask | masks.Window(length, 0)
        mask = ~~mask
    call = attnroute.explain(*[torch.zeros(1, 2, 8, 8)] * 3, mask).call
    assert len(call.mask) == 1


def test_unreasonable_data_is_refused():
    with pytest.raises(ValueError, match=f"at most {MASK_DEPTH} deep"):
        reduce(lambda node, _: AnyNode(parts=((NotNode(part=(node,)),),)), range(900), CausalNode())
    plain = {"kind": "causal"}
    for _ in range(900):
        plain = {"kind": "not", "part": [plain]}
    call = parse(LINE).model_dump()
    with pytest.raises((ArgumentError, ValidationError)):
        Call.model_validate({**call, "mask": [plain]})
