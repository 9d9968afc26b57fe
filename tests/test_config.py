"""The config: what is accepted, what each mistake is answered with, and which stage sees what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from carryover.artifacts import config_hash
from carryover.config import GENERATED_DATASETS, Config, config_from_dict, load_config
from carryover.config.keys import all_keys, dotted, explain
from carryover.config.load import ConfigError, merge
from carryover.config.precision import fast_bfloat16, has_bfloat16
from carryover.errors import CarryoverError
from carryover.paths import Paths

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT = REPOSITORY / "config" / "config.yaml"
TEST = REPOSITORY / "config" / "test.yaml"
TARGET, DRAFTER = "SmolLM2-135M", "DFlash"
OTHER_DTYPE = "float32" if fast_bfloat16() else "bfloat16"  # than `auto` means on this machine
MINIMAL = """
targets:
  T: {source: "path:model", feature_layers: [0, 2], mask_token_id: 3}
drafters:
  D: {kind: dflash}
"""


def problems(*overrides: str, files: Path | list[Path] = DEFAULT) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return caught.value.problems


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "own.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


# What is accepted


def test_default_config_says_what_it_says():
    config = load_config(DEFAULT)
    plain = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    here = "bfloat16" if fast_bfloat16() else "float32"
    plain["targets"][TARGET]["dtype"] = here
    plain["training"]["precision"] = plain["benchmark"]["dtype"] = here
    assert config.model_dump() == plain
    assert config.targets[TARGET].feature_layers == [1, 8, 14, 20, 27]
    assert config.training.baseline.learning_rate == 0.001


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512bw\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 fma\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16 dgh\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_has_the_instructions(cpuinfo, fast):
    assert has_bfloat16(cpuinfo) is fast


def test_a_dtype_that_is_written_out_is_taken(write):
    for dtype in ("bfloat16", "float32"):
        config = load_config(DEFAULT, [f"training.precision={dtype}", f"benchmark.dtype={dtype}"])
        assert (config.training.precision, config.benchmark.dtype) == (dtype, dtype)
    assert "auto" in problems("training.precision=half")[0]


def test_schema_defaults_equal_the_default_config(write):
    """config.yaml and the schema state each default; they must not drift apart."""
    default = load_config(DEFAULT).model_dump()
    minimal = load_config(write(MINIMAL)).model_dump()
    given = ("targets", "drafters")
    assert {k: v for k, v in minimal.items() if k not in given} == {
        k: v for k, v in default.items() if k not in given
    }
    required = {"kind"}
    for name, value in default["drafters"][DRAFTER].items():
        if name not in required:
            assert minimal["drafters"]["D"][name] == value, name


def test_json_schema_file_is_current():
    stored = json.loads((REPOSITORY / "config" / "schema.json").read_text(encoding="utf-8"))
    assert stored == Config.model_json_schema(), (
        "run: carryover config --schema > config/schema.json"
    )


def test_test_config_is_a_small_overlay():
    config = load_config([DEFAULT, TEST])
    assert config.results_dir == "results/test"
    assert config.training.baseline.steps == 30
    assert config.training.further.steps == 12
    # Not in the overlay, so from the default.
    assert config.training.further.learning_rate == 2.0e-4
    assert set(config.targets) == {TARGET}


def test_paper_config_is_an_overlay_without_the_default_target():
    config = load_config([DEFAULT, REPOSITORY / "config" / "paper.yaml"])
    assert TARGET not in config.targets
    assert config.training.losses.model_dump() == {
        "dflash": {"cross_entropy": 1.0, "distribution": 0.0},
        "markov": {"cross_entropy": 0.1, "distribution": 0.9, "confidence": 1.0},
    }
    # The paper's Table 4.
    assert config.targets["Qwen3-4B"].feature_layers == [1, 9, 17, 25, 33]
    assert {(d.layers, d.proposals) for d in config.drafters.values()} == {(5, 15)}


def test_merge_keys_may_be_replaced(write):
    """YAML's `<<`, also from a mapping that has one itself."""
    text = MINIMAL.replace(
        "  D: {kind: dflash}",
        """
  D: &d {kind: dflash, layers: 3}
  E: &e {<<: *d, kind: markov}
  F: {<<: *e, kind: dflash, layers: 4}""",
    )
    drafters = load_config(write(text)).drafters
    assert [(d.kind, d.layers) for d in drafters.values()] == [
        ("dflash", 3),
        ("markov", 3),
        ("dflash", 4),
    ]


def test_every_key_is_described_and_explained():
    text = explain()
    for key in all_keys():
        assert key.description, dotted(key.path)
        assert f"{key.path[-1]}:" in text
        assert key.description in text


@pytest.mark.parametrize(
    ("written", "value"),
    [("2e-3", 0.002), ("2.0e-3", 0.002), ("2E-3", 0.002), ("1e+0", 1.0), (".5", 0.5), ("1", 1.0)],
)
def test_every_way_to_write_a_number(write, written, value):
    config = load_config(write(MINIMAL + f"training: {{baseline: {{learning_rate: {written}}}}}"))
    assert config.training.baseline.learning_rate == value


def test_an_overlay_alone_is_told_what_it_goes_after(write):
    own = write(MINIMAL + "  Mine: {proposals: 5}\n")
    assert problems(files=own) == [
        f"{own}: drafters.Mine.kind: missing; an overlay goes after config/config.yaml"
    ]


def test_overlays_merge_left_to_right(write):
    first = write("training: {baseline: {steps: 5}, clip: 2.0}", "first.yaml")
    second = write("training: {baseline: {steps: 6}}", "second.yaml")
    config = load_config([DEFAULT, first, second], ["training.anchors=3"])
    assert config.training.baseline.steps == 6
    assert config.training.clip == 2.0
    assert config.training.anchors == 3
    assert config.training.baseline.learning_rate == 0.001


def test_null_in_an_overlay_takes_a_target_away(write):
    overlay = write(f"{MINIMAL.replace('drafters', f'  {TARGET}: null' + chr(10) + 'drafters')}")
    config = load_config([DEFAULT, overlay])
    assert list(config.targets) == ["T"]
    assert list(config.drafters) == [DRAFTER, "D"]


def test_names_with_dots_can_be_overridden(write):
    path = write(MINIMAL.replace("  T:", "  Qwen3-0.6B:"))
    config = load_config(path, ["targets.Qwen3-0.6B.dtype=float32"])
    assert config.targets["Qwen3-0.6B"].dtype == "float32"
    config = load_config([DEFAULT, path], ["targets.Qwen3-0.6B=null"])
    assert list(config.targets) == [TARGET]


def test_config_from_snakemake(write):
    """Snakemake reads YAML 1.1, where 2e-3 is a string, and hands over the merged mapping."""
    data = yaml.safe_load(MINIMAL + "training: {baseline: {learning_rate: 2e-3}}")
    assert data["training"]["baseline"]["learning_rate"] == "2e-3"
    before = json.dumps(data)
    config = config_from_dict(data, "config")
    assert config.training.baseline.learning_rate == 0.002
    assert json.dumps(data) == before
    with pytest.raises(ConfigError, match=r"^config/own.yaml: seed: expected a whole number"):
        config_from_dict({**data, "seed": "1"}, "config/own.yaml")


def test_what_snakemake_leaves_as_text_is_read():
    """`--config 'training={log_every: 7}'` reaches the Snakefile as {"log_every": "7"}."""
    data = yaml.safe_load(DEFAULT.read_text())
    overrides = {
        "seed": 5,
        "results_dir": "elsewhere",
        "training": {"log_every": "7", "further": {"learning_rate": "1e-5"}},
        "benchmark": {"temperatures": ["0", "0.5"], "interleave": "false"},
        "drafters": {"DFlash": {"initialize": "path: x"}},
    }
    config = config_from_dict(data, "x", overrides)
    assert (config.seed, config.results_dir, config.training.log_every) == (5, "elsewhere", 7)
    assert config.training.further.learning_rate == 1e-5
    assert config.benchmark.temperatures == [0, 0.5] and not config.benchmark.interleave
    assert config.drafters["DFlash"].initialize == "path: x"
    with pytest.raises(CarryoverError, match=r"^--config: training\.log_every: .*number"):
        config_from_dict(data, "x", {"training": {"log_every": "often"}})


values = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner), max_leaves=6
)
mappings = st.dictionaries(st.sampled_from("abc"), values)


@settings(max_examples=60, deadline=None)
@given(mappings, mappings)
def test_merge_keeps_the_overlay(base, overlay):
    merged = merge(base, overlay)
    assert set(merged) == set(base) | set(overlay)
    for key, value in merged.items():
        if key not in overlay:
            assert value == base[key]
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            assert merge(value, overlay[key]) == value
        else:
            assert value == overlay[key]
    assert merge(merged, overlay) == merged


# What each mistake is answered with


def test_unknown_key_names_file_and_nearest_key(write):
    own = write("training: {baseline: {stepz: 3}}")
    assert problems(files=[DEFAULT, own]) == [
        f"{own}: training.baseline.stepz: unknown key; did you mean training.baseline.steps?"
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("results_dirr=x", "results_dirr: unknown key; did you mean results_dir?"),
        ("learning_rate=1", "learning_rate: unknown key; did you mean training.baseline.learning_"),
        ("training.further.step=1", "did you mean training.further.steps?"),
        ("report.zzz=1", "report.zzz: unknown key"),
        ('seed="3"', 'seed: expected a whole number, found the text "3"'),
        ("seed=3.0", "seed: expected a whole number, found 3.0"),
        ("seed=true", "seed: expected a whole number, found true"),
        ("seed=-1", "seed: expected a number of at least 0, found -1"),
        ("training.clip=true", "training.clip: expected a number, found true"),
        ("training.clip=.nan", "training.clip: expected a finite number, found nan"),
        ("training.clip=", "training.clip: expected a number, found nothing (null)"),
        ("training.baseline=3", "training.baseline: expected a section of keys, found 3"),
        ("benchmark.interleave=1", "benchmark.interleave: expected true or false, found 1"),
        ("results_dir=3", "results_dir: expected text, found 3"),
        ('results_dir=""', "results_dir: expected some text"),
        ("training.decay_gamma=0", "training.decay_gamma: expected a number above 0"),
        ("responses.temperature=-0.1", "responses.temperature: expected a number of at least 0"),
        ("responses.top_p=1.5", "responses.top_p: expected a number of at most 1"),
        ("report.confidence=1", "report.confidence: expected a number below 1"),
        ("benchmark.temperatures=[0, -1]", "benchmark.temperatures[1]: expected a number of at"),
        ("benchmark.temperatures=[0, 0.0]", "benchmark.temperatures: each entry at most once"),
        ("benchmark.temperatures=[]", "benchmark.temperatures: at least one entry is needed"),
        ("benchmark.temperatures=0", "benchmark.temperatures: expected a list, found 0"),
        ("training.zero_stage=4", "training.zero_stage: expected a number of at most 3, found 4"),
        ("targets.SmolLM2-135M=null", "targets: at least one entry is needed"),
        ("drafters={DFlash: null}", "drafters: at least one entry is needed"),
        ("targets.SmolLM2-135M.feature_layers=[3, 1]", "layers must rise, each one once"),
        ("targets.SmolLM2-135M.feature_layers=[1, 1]", "layers must rise, each one once"),
        ("targets.SmolLM2-135M.feature_layers=[-1, 1]", "layers count from 0"),
        ("targets.SmolLM2-135M.feature_layers=[]", "at least one entry is needed"),
        ("targets.SmolLM2-135M.feature_layers=[1, x]", "feature_layers[1]: expected a whole num"),
        ("targets.SmolLM2-135M.source=hub:a/b", "write hub:ID@REVISION with a pinned revision"),
        ("targets.SmolLM2-135M.source=package:a", "write package:NAME==VERSION with a pinned ver"),
        ("targets.SmolLM2-135M.source=package:a>=1", "write package:NAME==VERSION"),
        ('targets.SmolLM2-135M.source="path:"', "nothing follows 'path:'"),
        ("targets.SmolLM2-135M.source=a/b", "expected package:NAME==VERSION, hub:ID@REVISION or"),
        ("targets.a/b={source: x}", "'a/b' names a file"),
        ("targets..x=1", "expected KEY=VALUE"),
        ("drafters.DFlash.kind=eagle", "drafters.DFlash.kind: expected dflash or markov, found"),
        ("drafters.DFlash.proposals=0", "proposals: expected a number of at least 1, found 0"),
        ("drafters.DFlash.initialize=copy", "expected random, target_last_layers, path:DIR or"),
        ("prompts.evaluation.source=hugging", "expected generated, path:FILE or hub"),
        ("prompts.evaluation.datasets=[../x]", "names a file, so it may hold letters"),
        ("prompts.evaluation.datasets=[qa, qa]", "each entry at most once, found 'qa' again"),
    ],
)
def test_one_bad_value_is_one_line(override, line):
    found = [problem for problem in problems(override) if line in problem]
    assert len(found) == 1
    assert found[0].startswith("--set: ")
    assert "\n" not in found[0]


def test_a_loss_without_a_drafting_term_is_refused():
    (line,) = problems("training.losses.dflash.cross_entropy=0")
    assert "training.losses.dflash.cross_entropy: cross_entropy and distribution are both 0" in line
    load_config(DEFAULT, ["training.losses.markov.cross_entropy=0"])


@pytest.mark.parametrize("rows", ["draft_tokens", "target_tokens", "target_top5"])
def test_token_hints_are_no_rows_that_could_be_told_apart(rows):
    for distinction in ("embedding", "projector"):
        (line,) = problems(f"carry.rows={rows}", f"carry.distinction={distinction}")
        assert f"carry.distinction: {distinction} " in line and "set distinction to none" in line
    config = load_config(DEFAULT, [f"carry.rows={rows}", "carry.distinction=none"])
    assert config.carry.rows == rows


def test_only_an_embedding_has_an_initial_value():
    for distinction in ("none", "projector"):
        (line,) = problems("carry.embedding_init=normal", f"carry.distinction={distinction}")
        assert "carry.embedding_init: normal is for E_carry" in line
    load_config(DEFAULT, ["carry.embedding_init=normal"])


def test_anchor_first_needs_markov():
    (line,) = problems("drafters.DFlash.slot_layout=anchor_first")
    assert "drafters.DFlash.slot_layout: anchor_first" in line and "kind: dflash" in line
    config = load_config(
        DEFAULT, ["drafters.DFlash.slot_layout=anchor_first", "drafters.DFlash.kind=markov"]
    )
    assert config.drafters["DFlash"].slot_layout == "anchor_first"


@pytest.mark.parametrize(("nodes", "ranks", "micro_batch"), [(3, 1, 1), (1, 3, 1), (2, 2, 4)])
def test_batch_divides_over_ranks(nodes, ranks, micro_batch):
    (line,) = problems(
        f"training.nodes={nodes}",
        f"training.ranks={ranks}",
        f"training.micro_batch={micro_batch}",
    )
    assert "training.responses_per_step: 2 is not a multiple of nodes * ranks * micro_batch" in line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training.held_out=1200", "must be below prompts.train.count (1200)"),
        ("training.held_out=1199", "more than the 1 responses that prompts.train.count"),
        ("benchmark.prompts=21", "more than prompts.evaluation.prompts_per_dataset (20)"),
        ("benchmark.max_tokens=1024", "must be below max_model_len (1024)"),
        ("responses.max_model_len=40", "responses.max_tokens: 40 leaves no room for a prompt"),
        ("prompts.evaluation.datasets=[qa, gsm8k]", "source: generated has no gsm8k; it has Hum"),
    ],
)
def test_impossible_combinations(override, line):
    (found,) = problems(override)
    assert line in found


def test_foreign_datasets_need_another_source():
    config = load_config(
        DEFAULT, ["prompts.evaluation.source=path:x.jsonl", "prompts.evaluation.datasets=[gsm8k]"]
    )
    assert config.prompts.evaluation.datasets == ["gsm8k"]


def test_all_problems_are_told_each_with_its_file(write):
    own = write("seed: x\nresponses: {top_k: -1}\ntraining: {micro_batch: 3}")
    found = problems("report.confidence=2", files=[DEFAULT, own])
    assert found == [
        f'{own}: seed: expected a whole number, found the text "x"',
        f"{own}: responses.top_k: expected a number of at least 0, found -1",
        f"{DEFAULT}: training.responses_per_step: 2 is not a multiple of "
        "nodes * ranks * micro_batch = 1 * 1 * 3 = 3",
        "--set: report.confidence: expected a number below 1, found 2",
    ]


def test_a_lone_overlay_is_told_apart():
    found = problems(files=TEST)
    assert [line.split(": ")[1] for line in found] == ["targets", "drafters"]
    assert all(str(TEST) in line and "config/config.yaml" in line for line in found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: [1\nresults_dir: x", "line 2: "),
        ("seed: 1\nreport: {}\nseed: 2", "line 3: key seed is given twice"),
        ("training:\n  clip: 1\n  clip: 2", "line 3: key clip is given twice"),
        ("- a\n- b", "expected `key: value` lines, found a list"),
        ("just text", 'expected `key: value` lines, found the text "just text"'),
        ("1: 2", "line 1: key 1 is not text"),
        ("? [a, b]\n: 3", "line 1: key"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: \x00", "not valid YAML"),
        ("a: *nowhere", "found undefined alias"),
        ("a: 2026-99-99", "not valid YAML: month must be in 1..12"),
    ],
)
def test_bad_yaml_is_one_line(write, text, line):
    path = write(text)
    (found,) = problems(files=path)
    assert found.startswith(f"{path}: ")
    assert line in found
    assert "\n" not in found


def test_unreadable_files_are_one_line(tmp_path):
    (found,) = problems(files=tmp_path / "none.yaml")
    assert found.startswith(f"{tmp_path / 'none.yaml'}: no such file")
    (found,) = problems(files=tmp_path)
    assert found == f"{tmp_path}: cannot be read: Is a directory"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (found,) = problems(files=tmp_path / "binary.yaml")
    assert found.endswith("not UTF-8 text")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
places = st.sampled_from([key.path for key in all_keys()])


@settings(max_examples=150, deadline=None)
@given(places, junk)
def test_no_value_anywhere_ends_in_another_exception(place, value):
    data = load_config(DEFAULT).model_dump()
    at = data
    place = [
        {"targets": TARGET, "drafters": DRAFTER}[place[0]] if p == "NAME" else p for p in place
    ]
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = value
    try:
        config = config_from_dict(data, "x")
    except ConfigError as error:
        assert error.problems
        assert all(line.startswith("x: ") for line in error.problems)
    else:
        assert isinstance(config, Config)


# Which stage sees what


def hashes(config: Config) -> dict[str, str]:
    stages = {
        "target": config.stage("target", TARGET),
        "train_prompts": config.stage("train_prompts"),
        "evaluation_prompts": config.stage("evaluation_prompts"),
        "responses": config.stage("responses", TARGET),
        "features": config.stage("features", TARGET),
        "baseline": config.stage("train", TARGET, DRAFTER, "baseline"),
        "control": config.stage("train", TARGET, DRAFTER, "control"),
        "carryover": config.stage("train", TARGET, DRAFTER, "carryover"),
        "benchmark": config.stage("benchmark", TARGET, DRAFTER),
        "report": config.stage("report"),
    }
    return {name: config_hash(subset) for name, subset in stages.items()}


TRAINED = {"baseline", "control", "carryover"}
MEASURED = {"benchmark", "report"}


@pytest.mark.parametrize(
    ("override", "reruns"),
    [
        ("report.confidence=0.9", {"report"}),
        ("benchmark.temperatures=[0, 1]", {"report"}),
        ("benchmark.max_tokens=65", MEASURED),
        ("prompts.evaluation.prompts_per_dataset=21", {"evaluation_prompts"} | MEASURED),
        ("carry.distinction=none", {"carryover"} | MEASURED),
        ("training.further.steps=7", {"control", "carryover"} | MEASURED),
        ("training.baseline.steps=7", TRAINED | MEASURED),
        ("training.anchors=7", TRAINED | MEASURED),
        ("training.losses.dflash.distribution=0.5", TRAINED | MEASURED),
        ("training.losses.markov.confidence=0.0", set()),  # the default's drafter is no Markov
        ("drafters.DFlash.layers=3", TRAINED | MEASURED),
        ("targets.SmolLM2-135M.mask_token_id=17", TRAINED | MEASURED),
        (
            "targets.SmolLM2-135M.feature_layers=[1, 2]",
            {"features"} | TRAINED | MEASURED,
        ),
        ("features.shard_tokens=7", {"features"} | TRAINED | MEASURED),
        ("responses.max_tokens=100", {"responses", "features"} | TRAINED | MEASURED),
        (
            "targets.SmolLM2-135M.thinking=true",
            {"responses", "features"} | TRAINED | MEASURED,
        ),
        (
            "prompts.train.count=1100",
            {"train_prompts", "responses", "features"} | TRAINED | MEASURED,
        ),
        (
            f"targets.SmolLM2-135M.dtype={OTHER_DTYPE}",
            {"target", "responses", "features"} | TRAINED | MEASURED,
        ),
        (
            "seed=43",
            {"train_prompts", "evaluation_prompts", "responses", "features"} | TRAINED | MEASURED,
        ),
        ("results_dir=elsewhere", set()),
        ("training.log_every=1", set()),
        ("training.evaluate_every=1", set()),
        ("training.checkpoint_every=1", set()),
        ("training.keep_checkpoints=1", set()),
        ("features.batch_tokens=100", set()),
        ("responses.max_num_seqs=1", set()),
    ],
)
def test_an_edit_reruns_what_it_decides_and_nothing_else(override, reruns):
    before = hashes(load_config(DEFAULT))
    after = hashes(load_config(DEFAULT, [override]))
    assert {stage for stage in before if before[stage] != after[stage]} == reruns


def test_variants_of_one_drafter_train_apart():
    config = load_config(DEFAULT)
    folders = {Paths(config).training(TARGET, DRAFTER, variant) for variant in TRAINED}
    assert len(folders) == 3
    other = load_config(DEFAULT, ["drafters.Second={kind: markov}"])
    assert Paths(other).training(TARGET, DRAFTER, "control") in folders


def test_another_target_reruns_only_the_report(write):
    more = load_config([DEFAULT, write(MINIMAL)])
    before, after = hashes(load_config(DEFAULT)), hashes(more)
    assert {stage for stage in before if before[stage] != after[stage]} == {"report"}


def test_stage_subsets_are_plain_json():
    config = load_config(DEFAULT)
    for subset in (config.stage("report"), config.stage("benchmark", TARGET, DRAFTER)):
        assert json.loads(json.dumps(subset)) == subset


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "X", DRAFTER, "control"), "--target X is not in the config. Its targets are Sm"),
        (
            ("train", TARGET, "X", "control"),
            "--drafter X is not in the config. Its drafters are DF",
        ),
        (("train", TARGET, DRAFTER, "autoregressive"), "--variant autoregressive is not trained"),
    ],
)
def test_stage_of_an_unknown_name(arguments, message):
    with pytest.raises(CarryoverError, match=message):
        load_config(DEFAULT).stage(*arguments)


def test_paths_follow_the_architecture_table():
    paths = Paths(load_config(DEFAULT))
    assert paths.target(TARGET) == Path("results/targets/SmolLM2-135M")
    assert paths.train_prompts() == Path("results/prompts/train.jsonl")
    assert paths.evaluation("qa") == Path("results/prompts/evaluation/qa.jsonl")
    assert paths.responses(TARGET) == Path("results/responses/SmolLM2-135M")
    assert paths.features(TARGET) == Path("results/features/SmolLM2-135M")
    assert paths.drafter(TARGET, DRAFTER, "control") == Path(
        "results/drafters/SmolLM2-135M/DFlash/control"
    )
    for temperature, shown in ((0, "0"), (0.0, "0"), ("0", "0"), (1, "1"), (0.7, "0.7")):
        assert paths.benchmark(TARGET, DRAFTER, temperature) == Path(
            f"results/benchmark/SmolLM2-135M/DFlash/temperature-{shown}.jsonl"
        )
    assert paths.trained(TARGET, DRAFTER, "control") == Path(
        "results/training/SmolLM2-135M/DFlash/control.json"
    )
    assert paths.speedup_csv() == Path("results/tables/speedup.csv")
    assert paths.speedup_md() == Path("results/tables/speedup.md")
    assert paths.figure("a.svg") == Path("results/figures/a.svg")
    assert paths.report() == Path("results/report.html")


def test_generated_datasets_are_those_the_prompts_stage_writes():
    from carryover.prompts import KINDS

    assert set(GENERATED_DATASETS) == {"HumanEval", *KINDS}


def test_config_imports_nothing_heavy():
    """Snakemake imports it for every job."""
    code = (
        "import sys, carryover.config, carryover.paths, carryover.cli;"
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
