"""What a user may import: every public name is documented, and every error is public."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import attnroute
from attnroute import errors


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


def test_every_error_of_the_package_is_one_of_errors_or_a_signal_of_one_module() -> None:
    """What derives from an exception anywhere else is private: it never leaves the code that raises it."""
    public = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    for path in sorted(Path(attnroute.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(re.search(r"(Error|Warning|Exception|Interrupt)$", base) for base in bases):
                is_signal = node.name.startswith("_") and not public & set(bases)
                assert is_signal or (path.name == "errors.py" and node.name in public), f"{path}: {node.name}"


def test_the_page_of_errors_lists_all_with_their_exit_codes() -> None:
    page = Path(__file__).parents[1] / "docs" / "api" / "errors.md"
    rows = re.findall(r"^\| `(\w+)` \|.*?(\d+)? \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: code for name, code in rows if code}
    classes = {
        name: v for name, v in vars(errors).items() if inspect.isclass(v) and v.__module__ == errors.__name__
    }
    assert {name for name, _ in rows} == set(classes)
    assert told == {
        name: str(v.exit_code) for name, v in classes.items() if issubclass(v, errors.AttnRouteError)
    }


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
