"""Expands the text banks `bank/KIND.yaml` into prompts.

A bank has two lists of groups, `train` and `evaluation`, that share no template and no topic. A
group:

    topic: item                 # the slot that names a prompt's topic
    weight: 2                   # turns a round, 1 if left out
    templates: ["How do I clean {item}?", ...]
    slots:
      item: [a cast-iron pan, ...]        # a list: one is drawn
      n: 3..9                             # an integer range, both ends included
      animal: {fields: [name, home], rows: ["otter | a river bank", ...]}   # {animal.home}

Slot values may hold slots themselves. Within a prompt a slot has one value. `{word}` that names no
slot of the group stays as it is (code and JSON are full of braces).
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

from carryover.prompts.prompt import Prompt, stable_id

Split = Literal["train", "evaluation"]
Value = str | dict[str, str]
SLOT = re.compile(r"\{([a-z][a-z0-9_]*)(?:\.([a-z][a-z0-9_]*))?\}")


@dataclass(frozen=True)
class Group:
    """Templates and the slots that fill them; `topic` names one of the slots."""

    topic: str
    weight: int
    templates: list[str]
    slots: dict[str, list[Value]]


def load_groups(kind: str, split: Split) -> list[Group]:
    """The groups of one bank file and split."""
    text = resources.files(__package__).joinpath("bank", f"{kind}.yaml").read_text("utf-8")
    return [
        Group(
            topic=raw["topic"],
            weight=raw.get("weight", 1),
            templates=[template.rstrip() for template in raw["templates"]],
            slots={name: _values(spec) for name, spec in raw["slots"].items()},
        )
        for raw in yaml.safe_load(text)[split]
    ]


def _values(spec: Any) -> list[Value]:
    if isinstance(spec, str):
        low, high = spec.split("..")
        return [str(number) for number in range(int(low), int(high) + 1)]
    if isinstance(spec, dict):
        rows = [[cell.strip() for cell in row.split("|")] for row in spec["rows"]]
        return [dict(zip(spec["fields"], row, strict=True)) for row in rows]
    return [str(value).rstrip() for value in spec]


def stream(kind: str, split: Split, seed: int) -> Iterator[Prompt]:
    """Endless prompts of one kind, repeats possible, the same for the same seed.

    The groups take turns; within a group each topic comes once before any comes again.
    """
    groups = load_groups(kind, split)
    turns = [number for number, group in enumerate(groups) for _ in range(group.weight)]
    decks = [
        _deck(kind, group, random.Random(f"{seed}/{split}/{kind}/{number}"))
        for number, group in enumerate(groups)
    ]
    while True:
        for number in turns:
            yield next(decks[number])


def _deck(kind: str, group: Group, rng: random.Random) -> Iterator[Prompt]:
    topics = list(group.slots[group.topic])
    templates = list(group.templates)
    rng.shuffle(templates)
    turn = 0
    while True:
        rng.shuffle(topics)
        for topic in topics:
            template = templates[turn % len(templates)]
            turn += 1
            bound: dict[str, Value] = {group.topic: topic}
            text = _fill(template, group, bound, rng)
            yield Prompt(
                id=stable_id(kind, text),
                dataset=kind,
                prompt=text,
                template=f"{kind}-{zlib.crc32(template.encode()):08x}",
                topic=_topic_id(topic),
            )
        # Else a group with as many topics as templates would pair them the same way each time.
        rng.shuffle(templates)


def _fill(text: str, group: Group, bound: dict[str, Value], rng: random.Random) -> str:
    def replace(match: re.Match[str]) -> str:
        name, field = match.groups()
        if name not in group.slots:
            return match.group()
        if name not in bound:
            bound[name] = rng.choice(group.slots[name])
        value = bound[name]
        chosen = value if isinstance(value, str) else value[field or next(iter(value))]
        return _fill(chosen, group, bound, rng)

    return SLOT.sub(replace, text)


def _topic_id(topic: Value) -> str:
    text = topic if isinstance(topic, str) else next(iter(topic.values()))
    words = "-".join(re.findall(r"\w+", text.lower())[:6])
    return f"{words}-{zlib.crc32(text.encode()):08x}"
