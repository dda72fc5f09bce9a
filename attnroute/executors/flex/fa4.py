"""FLEX_FA4: torch's FlexAttention with FlashAttention-4's kernels in place of Triton's.

What makes torch take them is the option BACKEND = "FLASH", which a table row sets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.executors.flex import run as flex
from attnroute.executors.protocol import Executor

if TYPE_CHECKING:
    from attnroute.executors.protocol import Inputs, Output, Plan


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the compiled call of the structure.

    Raises:
        NotCompiledError: torch.compile cannot compile here, or has compiled this structure too often.
    """
    return flex.run_as("flex_fa4", inputs, plan)


executor = Executor(run, compiled_seconds=flex.compiled_seconds)
