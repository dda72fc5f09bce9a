"""Check that calls show each answer about a feature, so that a flipped one is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.engine.evaluate import Form
from attnroute.engine.examples import read_example
from attnroute.errors import AttnRouteError
from attnroute.tables.folders import ANY
from attnroute.tables.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnroute.tables.folders import Tables
    from attnroute.tables.schema import FeatureAnswer, Shows
    from attnroute.vocabulary import Feature

_BIASES: Final = ("dense_bias", "function_bias", "alibi")
"""Without any of these nobody can ask for the gradient of a bias."""


def unshown(tables: Tables) -> Iterator[Problem]:
    """Give calls in `shows` that features do not treat as it says, and answers that none of them shows."""
    for scope in (ANY, *tables.arch_names):
        for backend in tables.backends:
            own = tables.answers(scope, backend)
            answers = {**tables.answers(ANY, backend), **own}
            parts = [table.shows for table in tables.files(scope, backend) if table.shows is not None]
            if not (tables.folders[0] / scope / f"{backend}.toml").is_file():
                continue  # Users show what they want.
            found = list(_shown(parts, answers))
            for said in (said for _, said in found if said):
                yield Problem(f"{scope}/{backend}.toml", "", "shows", said)
            for name in own.keys() - {name for names, _ in found for name in names}:
                if name != "bias_grad" or any(answers[other].value is True for other in _BIASES):
                    sentence = f"requires a call that shows features.{name}; got none."
                    yield Problem(f"{scope}/{backend}.toml", "", "shows", sentence)


def _shown(
    parts: list[Shows], answers: Mapping[Feature, FeatureAnswer]
) -> Iterator[tuple[list[Feature], str]]:
    """Give the features that each call shows, and what is wrong with it."""
    for part in parts:
        for kind in ("takes", "repaired", "refuses"):
            for text in getattr(part, kind):
                try:
                    form = Form(read_example(text).call)
                except AttnRouteError as error:
                    yield [], f'{str(error).rstrip(".")}; in "{text}".'
                    continue
                lacking = [name for name in form.features if answers[name].value is not True]
                names = list(form.features) if kind == "takes" else lacking
                yield names, _complaint(kind, text, form, lacking, answers)


def _complaint(
    kind: str, text: str, form: Form, lacking: list[Feature], answers: Mapping[Feature, FeatureAnswer]
) -> str:
    if kind == "takes":
        return f'takes requires features that are there; got {lacking[0]} in "{text}".' if lacking else ""
    if len(lacking) != 1:
        return f'{kind} requires one feature that is missing; got {", ".join(lacking) or "none"} in "{text}".'
    repair = answers[lacking[0]].repair
    if kind == "refuses":
        return f'refuses requires a feature without a repair; got {repair} in "{text}".' if repair else ""
    repaired = None if repair is None else form.repaired(repair)
    if repaired is None or lacking[0] in repaired[0].features:
        return f'repaired requires a call that {repair or "a repair"} makes acceptable; got "{text}".'
    return ""
