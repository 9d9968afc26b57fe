"""Settings that cannot be trained: refused by name, for the variants that they concern."""

import subprocess
import sys

import pytest

from carryover.config import config_from_dict
from carryover.errors import CarryoverError
from carryover.training.planned import refuse_planned

TARGET = {"source": "path:x", "feature_layers": [1], "mask_token_id": 1}


def config(drafters: dict, **sections: dict):
    return config_from_dict(
        {"targets": {"T": TARGET}, "drafters": drafters, **sections}, origin="test"
    )


def test_each_planned_setting_is_named_with_what_can_be_trained() -> None:
    drafters = {"A": {"kind": "dflash"}, "B": {"kind": "markov"}}
    for section, message in (
        ({"rows": "target_tokens"}, "carry.rows: target_tokens .* Set carry.rows to hidden_states"),
        ({"distinction": "none"}, "carry.distinction: none .* Set carry.distinction to embedding"),
    ):
        chosen = config({"A": drafters["A"]}, carry=section)
        with pytest.raises(CarryoverError, match=message):
            refuse_planned(chosen)
        # The other variants carry nothing.
        refuse_planned(chosen, ["A"], ["baseline", "control"])
    with pytest.raises(CarryoverError, match=r"drafters\.B\.kind: markov is planned"):
        refuse_planned(config(drafters))
    refuse_planned(config(drafters), ["A"])
    for name in ("random", "target_last_layers", "path:dir", "hub:a/b@c"):
        refuse_planned(config({"A": {"kind": "dflash", "initialize": name}}))


def test_the_check_needs_no_torch() -> None:
    """The workflow calls it in Snakemake's own process."""
    code = (
        "import sys, carryover.training.planned;"
        "print([name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
