"""What a call imports: no compiler where nothing compiles, so that it runs where a compiler cannot."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CALLS = {
    "plain": "attention(q, q, q)",
    "causal": "attention(q, q, q, is_causal=True, window=(3, 0))",
    "training": "attention(t, t, t, dropout_p=0.1).sum().backward()",
    "padding": "attention(t, t, t, masks.KeyPadding(lengths=[5])).sum().backward()",
    "dense": "attention(q, q, q, torch.ones(8, 8, dtype=torch.bool).tril())",
    "bias": "attention(t, t, t, bias=torch.zeros(8, 8, requires_grad=True)).sum().backward()",
    "sink": "attention(t, t, t, sink=torch.zeros(2, requires_grad=True)).sum().backward()",
    "functions": (
        "attention(t, t, t, ~masks.Function(lambda b, h, i, j: j > i),"
        " bias=biases.Function(lambda s, b, h, i, j: s * 2)).sum().backward()"
    ),
    "score features": "attention(q, q, q, softcap=3.0, alibi_slopes=torch.ones(2), return_lse=True)",
    "thd": (
        "attention(q[0], q[0], q[0], layout='thd', is_causal=True,"
        " cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32))"
    ),
    "every core backend": (
        "[attention(t, t, t, backend=b).sum().backward() for b in ('flash', 'chunked', 'math')]"
    ),
    "override": "exec('with attnroute.override(backend=\"chunked\"): attention(q, q, q)')",
    "vmap": "torch.vmap(lambda x: attention(x, x, x))(torch.randn(3, 1, 2, 8, 4))",
    "explain": "str(attnroute.explain(q, q, q))",
    "explain flex": "str(attnroute.explain(q, q, q, is_causal=True, backend='flex'))",
}
SCRIPT = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch._dynamo", "torch._inductor", "torch.nn.attention.flex_attention"):
            raise OSError(30, "Read-only file system", name)
sys.meta_path.insert(0, Watch())
import torch, attnroute
from attnroute import attention, biases, masks
q = torch.randn(1, 2, 8, 4)
t = q.clone().requires_grad_()
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_call_imports_no_compiler(call):
    program = SCRIPT + CALLS[call]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


UNWRITABLE = """
import warnings, torch, attnroute
from attnroute.errors import KernelRefusedError, RerouteWarning
q = torch.randn(1, 2, 8, 4)
want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always", RerouteWarning)
    for _ in range(2):
        torch.testing.assert_close(attnroute.attention(q, q, q, is_causal=True, prefer="flex"), want)
(warning,) = [w for w in told if w.category is RerouteWarning]
assert "NotADirectoryError" in str(warning.message), warning
for _ in range(2):
    try:
        attnroute.attention(q, q, q, is_causal=True, backend="flex")
    except KernelRefusedError as error:
        assert "NotADirectoryError" in str(error), error
    else:
        raise AssertionError("flex compiled where nothing can be written")
"""


def test_a_compiler_that_cannot_write_its_caches_makes_way_for_another_backend():
    """On the CPU flex compiles with inductor, whose import makes a folder."""
    done = subprocess.run(
        [sys.executable, "-c", UNWRITABLE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{os.devnull}/nowhere"},
    )
    assert done.returncode == 0, done.stderr
