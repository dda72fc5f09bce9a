"""C++ checks as Python functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnroute.audit.cpp import Function
from attnroute.audit.standins import _UndecidedError

HEADER = r"""
#define MACRO(port) \
    { RETURN_CUDNN_FRONTEND_ERROR_IF(true, X, "in a macro"); }

int64_t other() { return {error_code_t::GRAPH_NOT_SUPPORTED, "not this one"}; }

inline error_t
Node::check(int64_t const s_q) const override {
    MACRO(s_q); LOG_LABEL("INFO: if (a) { return; } " << s_q);
    auto const& band    = node->inputs.find(input_names::Band);  // a comment; with { braces }
    bool const has_band = (band != nullptr && band->second != nullptr);
    constexpr int64_t block = 32;
    int64_t const blocks = (s_q + block - 1) / block;
    {
        bool const odd = (s_q % 2 != 0) || !even_only;
        RETURN_CUDNN_FRONTEND_ERROR_IF(odd && s_q > 1, error_code_t::INVALID_VALUE,
                                       "odd, \"and\" more than one: " + std::to_string(s_q));
    }
    if (has_band) {
        RETURN_CUDNN_FRONTEND_ERROR_IF(s_q >= 64, error_code_t::GRAPH_NOT_SUPPORTED, "a band "
                                       "of many");
    } else if (blocks == 1 && detail::get_backend_version() < 91000) {
        return {error_code_t::GRAPH_NOT_SUPPORTED, "one block"};
    } else {
        seen = s_q;  /* assigned */
        auto verdict = surface(seen, {1, 2});
        if (verdict.is_good() == false) {
            return verdict;
        }
    }
    return {error_code_t::OK, ""};
}

error_t after() { RETURN_CUDNN_FRONTEND_ERROR_IF(true, X, "not this one"); }
"""


class Verdict(str):
    __slots__ = ()

    def is_good(self):
        return not self


@pytest.fixture
def check():
    function = Function(HEADER, "Node::check(")

    def run(s_q, band=None, cudnn=91900, said="", **names):
        given = {
            "s_q": s_q,
            "even_only": True,
            "node": SimpleNamespace(inputs=SimpleNamespace(find=lambda _: band)),
            "detail": SimpleNamespace(get_backend_version=lambda: cudnn),
            "std": SimpleNamespace(to_string=str),
            "surface": lambda *_: Verdict(said),
        }
        return function({**given, **names})

    return run


def test_what_nothing_refuses_is_taken(check):
    assert check(2) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"s_q": 3}, 'odd, "and" more than one: 3'),
        ({"s_q": 2, "even_only": False}, 'odd, "and" more than one: 2'),
        ({"s_q": 64, "band": SimpleNamespace(second=1)}, "a band of many"),
        ({"s_q": 62, "band": SimpleNamespace(second=1)}, ""),
        ({"s_q": 64, "band": SimpleNamespace(second=None)}, ""),
        ({"s_q": 32, "cudnn": 90900}, "one block"),
        ({"s_q": 34, "cudnn": 90900}, ""),
        ({"s_q": 2, "said": "from elsewhere"}, "from elsewhere"),
    ],
)
def test_each_kind_of_statement_means_what_it_means_in_cpp(check, given, said):
    assert check(**given) == said


def test_a_branch_on_a_name_that_nobody_gave_is_undecided():
    with pytest.raises(_UndecidedError):
        Function('check() { if (nobody_said) { return {E, "no"}; } return {E::OK, ""}; }', "check()")({})


def test_a_statement_that_is_not_known_is_an_error_and_no_silence():
    with pytest.raises(SyntaxError):
        Function("check() { goto end; }", "check()")
    with pytest.raises(KeyError, match="for"):
        Function("check() { for (int i = 0; i < 3; ++i) { } }", "check()")


def test_a_header_without_the_function_is_an_error():
    with pytest.raises(ValueError, match="requires absent"):
        Function(HEADER, "absent(")
