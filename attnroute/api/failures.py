"""The backends that refused calls in this process: later calls of the same kind exclude them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

from attnroute.memory import REFUSED, Memory
from attnroute.question.facts import BATCH_FACTS, LENGTH_FACTS, facts_of
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy, merge

if TYPE_CHECKING:
    from attnroute.question.call import Call
    from attnroute.question.host import Host

_IGNORED: Final = LENGTH_FACTS | BATCH_FACTS | {"compiled", "cuda_graph", "dispatch_mode", "transform"}
"""A kernel is compiled for all batches and lengths, and refuses eager and traced calls alike."""

_KEPT: Final = 1024
_FAILED: Memory[Hashable, dict[str, tuple[str]]] = Memory(_KEPT, f"{__name__}._FAILED", REFUSED)


def signature_of(call: Call, host: Host, policy: Policy) -> Hashable:
    """Return what calls have in common that a backend refuses alike: all but sizes that code does not know.

    Calls with one query, as decoding has them, stand apart: kernels have code of their own for these.
    """
    simple = normalize(call)
    facts = tuple(value for name, value in facts_of(simple).items() if name not in _IGNORED)
    transform = call.context.transform or policy.transform
    return (host.lasting, facts, transform, simple.seqlen_q > 1, tuple(node.kind for node in simple.mask))


def record(signature: Hashable, backend: str, reason: str) -> bool:
    """Remember that a backend refused such calls.

    Returns:
        Whether that is new.
    """
    known, own = _FAILED.keep(signature, dict), (reason,)
    return backend not in known and known.setdefault(backend, own) is own


def known(call: Call, host: Host, policy: Policy) -> Policy:
    """Return the policy with the backends that refused such calls.

    Who requires a backend, or is strict, gets the refusal itself and no other backend, so nothing is added.
    """
    if not _FAILED or policy.strict or policy.require is not None:
        return policy
    found = _FAILED.get(signature_of(call, host, policy))
    if found is None:
        return policy
    return also_failed(policy, {backend: reason for backend, (reason,) in found.copy().items()})


def also_failed(policy: Policy, refused: dict[str, str]) -> Policy:
    """Return the policy with further backends that refuse the call, and the error of each."""
    return merge(policy, Policy(failed=tuple(sorted({**dict(policy.failed), **refused}.items()))))
