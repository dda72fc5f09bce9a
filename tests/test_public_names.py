"""What a user sees first: every public name is documented, and the README's code runs as it is written."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attnroute
from attnroute import errors

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


@pytest.mark.parametrize("name", attnroute.__all__)
def test_public_name_has_its_own_docstring(name: str) -> None:
    value = getattr(attnroute, name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        assert name == "__version__", f"{name} is neither a class, a function nor a module"
        return
    text = value.__doc__ or ""
    assert text.strip(), f"{name} has no docstring"
    # A dataclass without a docstring is given its signature as one.
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that dataclass made"


OBJECTS = [(home, name) for home in (attnroute.biases, attnroute.masks) for name in home.__all__]


@pytest.mark.parametrize(("home", "name"), OBJECTS, ids=lambda part: getattr(part, "__name__", part))
def test_mask_and_bias_objects_have_their_own_docstrings(home: ModuleType, name: str) -> None:
    text = getattr(home, name).__doc__ or ""
    assert text.strip()
    assert not text.startswith(f"{name}(")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = attnroute.no_such_name


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    query = torch.randn(1, 4, 4096, 16, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    seen: list[Any] = []
    names = {"query": query, "key": query[:, :2], "value": query[:, :2], "model": seen.append, "batch": 1}
    names |= {
        "slopes": torch.rand(4),
        "logits": torch.randn(4),
        "packed": query[0].transpose(0, 1).expand(3, -1, -1, -1),
    }
    names["cu_seqlens"] = torch.tensor([0, 1000, 4096])
    exec(compile(example, str(README), "exec"), names)
    assert names["out"].shape == query.shape
    assert seen == [1]
    assert "selected" in capsys.readouterr().out


def test_the_examples_of_the_page_about_arguments_run() -> None:
    page = ROOT / "docs" / "attention.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names: dict[str, Any] = {}
        exec(compile(example, str(page), "exec"), names)
        assert names["out"].shape == names["query"].shape


def test_every_documented_error_and_warning_is_public() -> None:
    documented = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert documented <= set(attnroute.__all__)
    assert all(getattr(attnroute, name) is getattr(errors, name) for name in documented)
    assert all(
        issubclass(getattr(errors, name), attnroute.AttnRouteError | Warning) for name in sorted(documented)
    )


def test_the_examples_of_the_page_about_code_that_nobody_edits_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ROOT / "docs" / "unmodified-code.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(page), "exec"), names)
    assert [call.count for call in names["trace"].calls] == [2]
    assert capsys.readouterr().out.startswith("chunked 2 fp32 b2 hq4")
    assert names["tokens"].grad is None
    assert all(p.grad is not None for p in names["model"].parameters())
