"""Settings that cannot be trained: refused by name."""

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
    refuse_planned(config(drafters))
    released = config({"A": {"kind": "dflash", "initialize": "path:dir"}})
    with pytest.raises(CarryoverError, match=r"drafters\.A\.initialize: path:dir .*target_last"):
        refuse_planned(released, ["A"])
    for section in ({"rows": "target_top5", "distinction": "none"}, {"distinction": "projector"}):
        refuse_planned(config({"A": drafters["A"]}, carry=section))
    for name in ("random", "target_last_layers"):
        refuse_planned(config({"A": {"kind": "dflash", "initialize": name}}))


def test_the_check_needs_no_torch() -> None:
    """The workflow calls it in Snakemake's own process."""
    code = (
        "import sys, carryover.training.planned;"
        "print([name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
