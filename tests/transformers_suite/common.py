"""transformers' common tests, one class for each family of models, with attnroute in place of sdpa."""

from __future__ import annotations

import unittest

import transformers
from transformers_suite.families import FAMILIES, Family, ModelTester
from transformers_suite.source import common_tests, route_by_default

COMMON = common_tests()
route_by_default()


def _tests_of(name: str, family: Family) -> type:
    def set_up(self: unittest.TestCase) -> None:
        self.model_tester = ModelTester(family)

    members = {
        "setUp": set_up,
        "all_model_classes": tuple(getattr(transformers, model) for model in family.models),
        "is_encoder_decoder": family.inputs in ("pair", "sound"),
        **family.attributes,
    }
    return type(name, (COMMON.ModelTesterMixin, unittest.TestCase), {**members, "__module__": __name__})


for _name, _family in FAMILIES.items():
    globals()[f"Test_{_name}"] = _tests_of(f"Test_{_name}", _family)
