"""`trace()`: what ran is recorded with counts, by every thread, and nothing outside of the block."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.api import routes
from attnroute.api.recording import Recording
from attnroute.errors import ArgumentError


def heads(seqlen=40, count=2, *, grad=False):
    return torch.randn(2, count, seqlen, 16, requires_grad=grad)


def test_kinds_of_calls_are_counted_the_most_frequent_first():
    query, tokens = heads(grad=True), torch.randn(2, 40, 2, 16).transpose(1, 2)
    with attnroute.trace() as trace:
        attnroute.attention(query, query, query, is_causal=True)
        for _ in range(3):
            attnroute.attention(tokens, tokens, tokens, backend="chunked")
    seen = [(c.line, c.backend, c.count, c.how, c.device, c.memory) for c in trace.calls]
    size = "fp32 b2 hq2 hkv2 sq40 skv40 d16"
    assert seen == [
        (size, "chunked", 3, "eager", "cpu", ("bshd",) * 3),
        (f"{size} causal train", "flash", 1, "eager", "cpu", ("bhsd",) * 3),
    ]


def test_a_route_from_before_is_counted_and_afterwards_nothing_listens():
    query = heads(41)
    attnroute.attention(query, query, query)
    with attnroute.trace() as trace:
        attnroute.attention(query, query, query)
    attnroute.attention(query, query, query)
    assert [(c.call.seqlen_q, c.count) for c in trace.calls] == [(41, 1)]
    assert routes.LISTENERS == []


def test_calls_that_go_the_short_way_are_counted():
    inputs = [heads(42) for _ in range(3)]
    for _ in range(3):
        attnroute.attention(*inputs)
    with attnroute.trace() as trace:
        for _ in range(3):
            attnroute.attention(*inputs)
    assert [(c.call.seqlen_q, c.count) for c in trace.calls] == [(42, 3)]


def test_each_exact_length_is_a_kind_of_its_own():
    with attnroute.trace() as trace:
        for seqlen in (50, 51, 51):
            attnroute.attention(*[heads(seqlen)] * 3)
    assert [(c.call.seqlen_q, c.count) for c in trace.calls] == [(51, 2), (50, 1)]


def test_masks_and_packed_batches_say_what_they_are():
    query = heads(1)
    tokens = torch.randn(60, 2, 16)
    with attnroute.trace() as trace:
        attnroute.attention(query, heads(), heads(), masks.KeyPadding(lengths=torch.tensor([3, 40])))
        sums = torch.tensor([0, 20, 60], dtype=torch.int32)
        attnroute.attention(tokens, tokens, tokens, is_causal=True, layout="thd", cu_seqlens_q=sums)
    packed, padded = sorted(trace.calls, key=lambda c: c.call.layout != "thd")
    assert packed.line.split()[-3:] == ["thd", "documents=x2", "causal"]
    assert [node.kind for node in padded.call.mask] == ["key_padding"]
    assert padded.memory == ("bhsd",) * 3


def test_a_graph_is_recorded_where_it_is_made_without_a_count():
    query = heads(43)
    torch.compiler.reset()
    compiled = torch.compile(lambda q: attnroute.attention(q, q, q), backend="aot_eager", fullgraph=True)
    with attnroute.trace() as trace:
        for _ in range(4):
            compiled(query)
    (call,) = trace.calls
    assert (call.how, call.count, call.call.context.compiled) == ("compiled", None, True)
    torch.compiler.reset()


def test_threads_lose_no_call():
    query = heads(44)

    def work():
        for _ in range(50):
            attnroute.attention(query, query, query)

    with attnroute.trace() as trace:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [c.count for c in trace.calls] == [200]


def test_blocks_inside_of_each_other_record_each_for_itself():
    query = heads(45)
    with attnroute.trace() as outer:
        attnroute.attention(query, query, query)
        with attnroute.trace() as inner:
            attnroute.attention(query, query, query)
        attnroute.attention(query, query, query)
    assert ([c.count for c in outer.calls], [c.count for c in inner.calls]) == ([3], [1])


def test_the_file_is_read_back_and_written_after_an_error_too(tmp_path):
    path, query = tmp_path / "calls.json", heads(46)

    def run():
        attnroute.attention(query, query, query)
        raise RuntimeError("the model")

    with pytest.raises(RuntimeError, match="the model"), attnroute.trace(path) as trace:
        run()
    found = Recording.from_file(path)
    assert found == trace.recording
    assert (found.hosts["cpu"].arch, [c.count for c in found.calls]) == ("cpu", [1])
    assert json.loads(path.read_text(encoding="utf-8"))["format"] == 2


def test_a_call_that_is_refused_is_not_counted():
    query = heads(47)
    with attnroute.trace() as trace, pytest.raises(ArgumentError):
        attnroute.attention(query, query, query, causal_alignment="nowhere", is_causal=True)
    assert trace.calls == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "Invalid JSON"),
        ('{"format": 1, "hosts": {}, "calls": []}', "format"),
        (
            '{"hosts": {}, "calls": [{"line": "bf16 nonsense", "device": "cpu", "backend": "flash"}]}',
            "nonsense",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_with_a_sentence(tmp_path, content, said):
    path = tmp_path / "calls.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"attnroute run --out FILE script\.py") as refused:
        Recording.from_file(path)
    assert said in str(refused.value)
    assert "calls.json" in str(refused.value)


def test_the_place_of_the_file_must_be_a_path_that_can_be_written(tmp_path):
    with pytest.raises(ArgumentError, match="trace\\(\\) path requires a path or None; got int"):
        attnroute.trace(3)
    with pytest.raises(ArgumentError, match="a place to write to"), attnroute.trace(tmp_path / "no" / "x"):
        pass


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dropout_p": 1.0}, "its dropout_p is not in [0, 1)"),
        ({"key": heads(1), "value": heads(1)[:1]}, "its sizes are empty, broadcast, or fit in no way"),
    ],
)
def test_a_call_of_torch_without_a_line_says_why(change, why):
    query = heads()
    with attnroute.trace() as trace:
        torch.nn.functional.scaled_dot_product_attention(
            **{"query": query, "key": query, "value": query, **change}
        )
    (seen,) = trace.stock
    assert (seen.line, seen.unread) == ("", why)
    assert f"a call that attention() does not take: {why}" in " ".join(str(trace).split())
