"""One prompt and its line in a jsonl file."""

import hashlib
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Prompt:
    """One user message.

    id: stable; the same text of the same data set has the same id.
    dataset: the kind (`chat`, `math`, ...) or, at paper scale, the source's name.
    template, topic: what it was made from; empty for prompts that were read, not written here.
    """

    id: str
    dataset: str
    prompt: str
    template: str = ""
    topic: str = ""

    def row(self) -> dict[str, str]:
        """The prompt as one jsonl object."""
        return asdict(self)


def stable_id(dataset: str, text: str) -> str:
    """`DATASET-` and 12 hex digits of the text's SHA-256."""
    return f"{dataset}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
