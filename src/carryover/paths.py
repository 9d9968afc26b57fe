"""Where each stage writes, below `results_dir` (the table in docs/architecture.md)."""

from pathlib import Path

from carryover.artifacts import config_hash
from carryover.config import Config


class Paths:
    """Paths of the results of one config. They depend on names alone, but for `training`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.root = Path(config.results_dir)

    def target(self, target: str) -> Path:
        """Folder: the target as a Hugging Face checkpoint."""
        return self.root / "targets" / target

    def released(self, target: str, drafter: str) -> Path:
        """Folder: the released drafter that the baseline starts from, in our format."""
        return self.root / "released" / target / drafter

    def train_prompts(self) -> Path:
        return self.root / "prompts" / "train.jsonl"

    def evaluation(self, dataset: str) -> Path:
        return self.root / "prompts" / "evaluation" / f"{dataset}.jsonl"

    def responses(self, target: str) -> Path:
        """Folder of shards."""
        return self.root / "responses" / target

    def features(self, target: str) -> Path:
        """Folder of shards and their index."""
        return self.root / "features" / target

    def training(self, target: str, drafter: str, variant: str) -> Path:
        """Folder of checkpoints and metrics.

        It is named after the config too: another config trains in another folder, so it neither
        resumes from a foreign checkpoint nor overwrites one.
        """
        subset = self._config.stage("train", target, drafter, variant)
        return self.root / "training" / target / drafter / f"{variant}-{config_hash(subset)}"

    def trained(self, target: str, drafter: str, variant: str) -> Path:
        """File that names the last checkpoint of a finished training."""
        return self.root / "training" / target / drafter / f"{variant}.json"

    def drafter(self, target: str, drafter: str, variant: str) -> Path:
        """Folder: the exported drafter checkpoint, which vLLM loads."""
        return self.root / "drafters" / target / drafter / variant

    def benchmark(self, target: str, drafter: str, temperature: float | str) -> Path:
        """`temperature` 0, 0.0 and "0" name the same file."""
        name = f"temperature-{float(temperature):g}.jsonl"
        return self.root / "benchmark" / target / drafter / name

    def speedup_csv(self) -> Path:
        return self.root / "tables" / "speedup.csv"

    def speedup_md(self) -> Path:
        return self.root / "tables" / "speedup.md"

    def comparison_csv(self) -> Path:
        """Our numbers beside the paper's."""
        return self.root / "tables" / "paper_comparison.csv"

    def figure(self, name: str) -> Path:
        """`name` with its suffix, e.g. `acceptance_length.svg`."""
        return self.root / "figures" / name

    def report(self) -> Path:
        return self.root / "report.html"
