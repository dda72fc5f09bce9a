"""What listeners hear of kernels that compile at their first call, whichever package they are of."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from support.cudnn_checks import inputs_of, plan_of, ragged_request, request_of

from attnroute import settings
from attnroute.api import routes
from attnroute.executors import first_call
from attnroute.executors.flex import compile as flex_compile
from attnroute.executors.packages.external import External
from attnroute.executors.packages.request import Gradients, Launched
from attnroute.memory import reset

FORWARD = "forward of float64, head dimensions 8, 8"
BACKWARD = "backward of float64, head dimensions 8, 8"


class Kernel:
    """Zeros of the right shapes; a launch takes as long as it is told, and may warn or raise."""

    gives_infinity = False
    seconds = 0.0
    warns = False
    raising = None

    def forward(self, request):
        time.sleep(self.seconds)
        if self.warns:
            warnings.warn("of the compiler", UserWarning, stacklevel=1)
        if self.raising is not None:
            raise self.raising
        query = request.query
        shape = query.shape[:-1] if request.is_ragged else (query.shape[0], query.shape[2], query.shape[1])
        return Launched(torch.zeros_like(query), torch.zeros(shape))

    def backward(self, request, ran, grad_out):
        return Gradients(*(torch.zeros_like(t) for t in (request.query, request.key, request.value)))


class Quiet(Kernel):
    def forward(self, request):
        return Launched(torch.zeros_like(request.query), torch.zeros(2, 4, request.query.shape[1]))


KERNEL = Kernel()
EXTERNAL = External("first_call_test", KERNEL)
QUIET = External("first_call_quiet", Quiet())


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    reset()
    monkeypatch.setattr(first_call, "_LISTENERS", {})
    monkeypatch.setattr(KERNEL, "seconds", 0.0)


@pytest.fixture
def heard():
    found = []
    listener = lambda *said: found.append(said)  # noqa: E731
    for _ in range(2):
        first_call.listen("first_call_test", listener)
    return found


def launch(external=EXTERNAL, request=None):
    return external._launcher.forward(request_of() if request is None else request)


def test_each_side_is_announced_once_before_it_is_launched(heard):
    for length in (5, 9):
        inputs = inputs_of(None, length, 7)
        out, _ = EXTERNAL.run(inputs, plan_of("first_call_test"))
        out.sum().backward()
    assert heard == [("first_call_test", FORWARD, None), ("first_call_test", BACKWARD, None)]


def test_seconds_are_told_where_somebody_waited(heard, monkeypatch):
    monkeypatch.setattr(KERNEL, "seconds", 0.02)
    monkeypatch.setattr(first_call, "NOTABLE_SECONDS", 0.01)
    for _ in range(2):
        launch()
    (start, end) = heard
    assert start == ("first_call_test", FORWARD, None)
    assert end[:2] == start[:2]
    assert end[2] >= 0.02


@pytest.mark.parametrize(
    "changes",
    [
        {"left": 3, "right": 0},
        {"right": 0},
        {"softcap": 2.0},
        {"sink": torch.zeros(4)},
        {"deterministic": True},
        {"options": "pack_gqa=False"},
    ],
    ids=", ".join,
)
def test_what_makes_code_of_its_own_is_announced_again(heard, changes):
    for request in (request_of(), request_of(**changes), request_of(**changes), ragged_request()):
        launch(request=request)
    assert len(heard) == 3


def test_what_only_makes_other_numbers_is_not_announced_again(heard):
    requests = (
        request_of(left=2, right=1),
        request_of(None, 9, 300, left=5, right=3),
        request_of(left=2, right=1, scale=3.0),
    )
    for request in requests:
        launch(request=request)
    assert len(heard) == 1


def test_a_kernel_that_is_compiled_ahead_is_never_announced(heard):
    launch(QUIET)
    assert not heard


@pytest.mark.usefixtures("heard")
def test_a_compiler_that_warns_is_not_heard_and_a_later_warning_is(monkeypatch):
    monkeypatch.setattr(KERNEL, "warns", True)
    launch()
    with pytest.raises(RuntimeError, match="UserWarning: of the compiler"):
        launch()


def test_a_compiler_that_gives_up_has_no_seconds(heard, monkeypatch):
    monkeypatch.setattr(first_call, "NOTABLE_SECONDS", 0.0)
    monkeypatch.setattr(KERNEL, "raising", TypeError("no such tile"))
    with pytest.raises(RuntimeError, match="no such tile"):
        launch()
    assert heard == [("first_call_test", FORWARD, None)]


def test_forgetting_announces_anew(heard):
    launch()
    reset()
    launch()
    assert len(heard) == 2


@pytest.mark.parametrize(("mode", "is_said"), [("off", False), ("once", True), ("all", True)])
def test_users_read_it_on_stderr_where_they_asked(monkeypatch, capsys, mode, is_said):
    monkeypatch.setattr(settings, "explain_mode", lambda: mode)
    monkeypatch.setattr(first_call, "NOTABLE_SECONDS", 0.0)
    for _ in range(2):
        routes.show_compilations("first_call_test")
    launch()
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines
        == [
            f"attnroute: first_call_test is compiling: {FORWARD}",
            f"attnroute: first_call_test compiled in 0.0 s: {FORWARD}",
        ]
        * is_said
    )


@pytest.mark.parametrize("backend", ["flex", "flex_fa4"])
def test_flex_says_its_own_name_by_the_same_way(monkeypatch, capsys, backend):
    monkeypatch.setattr(settings, "explain_mode", lambda: "once")
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda *_: None)
    routes.show_compilations(backend)
    flex_compile._measured(flex_compile.Compiled("j <= i", backend))(None, [])
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"attnroute: {backend} is compiling: j <= i"
    assert last.startswith(f"attnroute: {backend} compiled in 0.0 s")
