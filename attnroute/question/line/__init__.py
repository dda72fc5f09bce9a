"""Write a `Call` as one line of words for people, logs and the command line, and read it back.

`bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train`: sizes first, then what differs from the default. Words
of the mask keep their order; every other word may stand anywhere. `WORDS` lists them all.

Mask words nest: `any(causal+window=3,0|prefix=5)` allows what causal and the window allow together, and what
the prefix allows; `not(documents)` allows what documents forbid. `full` stands for a part without words.
"""

from __future__ import annotations

from attnroute.question.line.reading import parse
from attnroute.question.line.words import WORDS, split
from attnroute.question.line.writing import render

__all__ = ["WORDS", "parse", "render", "split"]
