"""Where nothing can be written, what stock runs `attention()` runs too, and a compiler makes way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

CALLS = """
import warnings, torch, attnroute
from attnroute import biases, masks
from attnroute.errors import RerouteWarning
warnings.simplefilter("ignore", RerouteWarning)
q = torch.randn(2, 4, 40, 16)
t = q.clone().requires_grad_()
reference = torch.nn.functional.scaled_dot_product_attention
causal = torch.ones(40, 40, dtype=torch.bool).tril()
n = 0
for prefer in (None, "flex", "chunked", "math"):
    for mask in (masks.Causal(), causal, ~masks.Function(lambda b, h, i, j: j > i)):
        got = attnroute.attention(q, q, q, mask, prefer=prefer)
        torch.testing.assert_close(got, reference(q, q, q, causal))
        attnroute.attention(t, t, t, mask, prefer=prefer).sum().backward()
        n += 2
    attnroute.attention(t, t, t, bias=biases.Function(lambda s, b, h, i, j: s * 2), prefer=prefer)
    str(attnroute.explain(q, q, q, prefer=prefer))
    n += 2
print(n)
"""


def ran(command, **changes):
    """Run the calls behind a command, and return how many of them ran."""
    env = {**os.environ, **changes}
    line = [*command, sys.executable, "-B", "-W", "ignore", "-c", CALLS]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def read_only(folder):
    """Return what runs a command with a folder that cannot be written, None where nobody may mount."""
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    script = f'{mount} && ! touch {folder}/new 2>/dev/null && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None:
        return None
    tried = subprocess.run([*command, "true"], check=False, capture_output=True)
    return None if tried.returncode else command


def main():
    """Take away the cache of the compiler first, and then every place that can be written."""
    nowhere = f"{os.devnull}/nowhere"
    found = {"no cache": ran([], TORCHINDUCTOR_CACHE_DIR=nowhere, TRITON_CACHE_DIR=nowhere)}
    found["no home"] = ran([], TORCHINDUCTOR_CACHE_DIR=nowhere, HOME=nowhere, XDG_CACHE_HOME=nowhere)
    with tempfile.TemporaryDirectory() as folder:
        command = read_only(folder)
        if command is None:
            found["read-only folder"] = "not tried: this machine lets nobody mount"
        else:
            found["read-only folder"] = ran(
                command, TMPDIR=folder, HOME=folder, TORCHINDUCTOR_CACHE_DIR=folder
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
