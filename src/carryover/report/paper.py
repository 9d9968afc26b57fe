"""The paper's printed numbers (arXiv 2609.14717v1), for comparison only.

`paper/*.csv` are transcribed tables of other targets on other hardware. They never enter our own
results: only the page and `tables/paper_comparison.csv` put them beside ours.
"""

import math
from collections.abc import Mapping
from importlib import resources

import pandas as pd

from carryover.report.table import AVERAGE

# Our names of data sets to the paper's.
DATASETS = {
    "HumanEval": "HumanEval",
    "math": "Math",
    "chat": "MT-Bench",
    "qa": "QA",
    "rag": "RAG",
    "summarization": "Summarization",
    "tool": "Tool",
    "translation": "Translation",
    AVERAGE: "Average",
}
_OURS = ("baseline", "carryover", "gain_percent", "gain_percent_low", "gain_percent_high")
_PAPERS = ("baseline", "carryover", "gain_percent")
COLUMNS = (
    *("target", "drafter", "dataset", "temperature", "paper_target", "paper_dataset"),
    *(f"acceptance_length_{part}" for part in _OURS),
    *(f"paper_acceptance_length_{part}" for part in _PAPERS),
    *(f"speedup_{part}" for part in _OURS),
    *(f"paper_speedup_{part}" for part in _PAPERS),
    "prompts",
)
DRAFTERS = {"dflash": "DFlash", "markov": "Markov"}  # config's `kind` to the paper's name


def read_table(name: str) -> pd.DataFrame:
    """One of the transcribed tables, e.g. `table1_acceptance_speedup`."""
    source = resources.files("carryover.report") / "paper" / f"{name}.csv"
    with source.open(encoding="utf-8") as file:
        return pd.read_csv(file)


def compare(table: pd.DataFrame, kinds: Mapping[str, str]) -> pd.DataFrame:
    """Our rows beside the paper's for the same kind of drafter, data set and temperature.

    `kinds`: drafter name to its `kind` of the config. One row per our (target, drafter, dataset,
    temperature) and paper target; combinations that the paper does not print are left out.
    Gains are relative, in percent, of carryover over baseline; ours keep their interval.
    """
    printed = read_table("table1_acceptance_speedup").set_index(
        ["drafter", "dataset", "temperature", "target", "carryover"]
    )
    rows = []
    keys = ["target", "drafter", "dataset", "temperature"]
    for (target, drafter, dataset, temperature), part in table.groupby(keys, sort=False):
        wanted = (DRAFTERS[kinds[str(drafter)]], DATASETS.get(str(dataset)), temperature)
        by_variant = part.set_index("variant")
        for other in printed.index.unique("target"):
            without, carried = ((*wanted, other, flag) for flag in (False, True))
            if without not in printed.index or carried not in printed.index:
                continue
            row = {"target": target, "drafter": drafter, "dataset": dataset}
            row |= {"temperature": temperature, "paper_target": other, "paper_dataset": wanted[1]}
            for name, gain in (("acceptance_length", "gain"), ("speedup", "speedup_gain")):
                row |= {
                    f"{name}_baseline": by_variant.at["baseline", name],
                    f"{name}_carryover": by_variant.at["carryover", name],
                    f"{name}_gain_percent": by_variant.at["carryover", f"{gain}_percent"],
                    f"{name}_gain_percent_low": by_variant.at["carryover", f"{gain}_percent_low"],
                    f"{name}_gain_percent_high": by_variant.at["carryover", f"{gain}_percent_high"],
                }
                before, after = printed.at[without, name], printed.at[carried, name]
                row |= {
                    f"paper_{name}_baseline": before,
                    f"paper_{name}_carryover": after,
                    f"paper_{name}_gain_percent": (
                        100.0 * (after / before - 1.0) if before else math.nan
                    ),
                }
            row["prompts"] = by_variant.at["carryover", "prompts"]
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))
