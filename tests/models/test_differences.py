"""How the difference of two models is described."""

from __future__ import annotations

from meshwright.models.differences import differing_fields


def test_fields_have_the_names_of_the_spec_and_parts_only_those_that_differ() -> None:
    there = {"norm_epsilon": 1e-6, "layers": 2, "mixture": {"groups_per_token": 1, "experts": 4}, "latent": None}
    here = {"norm_epsilon": 1e-5, "layers": 2, "mixture": {"groups_per_token": 2, "experts": 4}, "latent": {"rank": 1}}
    assert differing_fields(there, here) == [
        "`normEpsilon` 1e-06 there, 1e-05 here",
        "`mixture.groupsPerToken` 1 there, 2 here",
        "`latent` None there, {'rank': 1} here",
    ]
    assert differing_fields({"heads": 2}, {"heads": 4}, "in `model`") == ["`heads` 2 there, 4 in `model`"]
    assert differing_fields(here, here) == []
