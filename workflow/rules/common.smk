# Shared by the rule files - the checked config, the paths, the helper functions.

import os
import sys
from pathlib import Path

SOURCES = Path(workflow.basedir) / "src"
# The stages run with the package and the interpreter that run this file, whether or not the
# environment is activated or holds another checkout.
sys.path.insert(0, str(SOURCES))
os.environ.update(
    PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
    PYTHONPATH=os.pathsep.join(
        filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")])
    ),
)

from carryover.artifacts import check_folder, write_json
from carryover.config import config_from_dict
from carryover.config.servable import check_servable
from carryover.errors import CarryoverError
from carryover.identity import source_content, stage_code
from carryover.paths import Paths


def checked(raw):
    """The validated config; a mistake in it ends the run with one readable message."""
    files = [os.path.relpath(path) for path in workflow.configfiles]
    try:
        checked = config_from_dict(
            raw,
            origin=" + ".join(dict.fromkeys(files)),
            overrides=workflow.config_settings.config,
        )
        check_folder(Path(checked.results_dir))
        return checked
    except CarryoverError as error:
        sys.exit("\n".join(f"error: {line}" for line in str(error).splitlines()))


settings = checked(config)
paths = Paths(settings)
results = paths.root
# What the stages are given as --config: all files and command-line overrides, merged.
SETTINGS = f"{results}/config.json"
# More than any machine has: Snakemake lowers it to --cores, so such a job runs alone. Two of them
# at once on few cores take far more than twice the time, and would disturb the measurement.
ALL_CORES = 1024


wildcard_constraints:
    target="|".join(map(re.escape, settings.targets)),
    drafter="|".join(map(re.escape, settings.drafters)),
    variant="baseline|control|carryover",
    temperature=r"\d+(\.\d+)?",


def write_settings():
    """Write the config that the stages read."""
    try:
        write_json(SETTINGS, settings.model_dump(mode="json"))
    except CarryoverError as error:
        sys.exit(f"error: {error}")


def manifest(folder):
    """The file that says that the output in `folder` is complete.

    Only this file is declared as output. Snakemake deletes what is declared when a job fails or
    starts again, and the finished shards beside it are what a rerun goes on from.
    """
    return f"{folder}/manifest.json"


def stage(name, *wildcards):
    """Params function: the part of the config that decides the result of stage `name`.

    `wildcards` name the wildcards that the part depends on: target, drafter, variant.
    """
    return lambda given: settings.stage(name, **{key: given[key] for key in wildcards})


def several_nodes():
    """SLURM's resources of a training that spans nodes; on one node there are none to name."""
    nodes = settings.training.nodes
    if nodes == 1:
        return {}
    return {"nodes": nodes, "tasks": nodes, "mpi": "srun", "tasks_per_gpu": 0}


def recorded():
    """The manifest of what drafters train on: features, or responses where features are online."""
    online = settings.training.features == "online"
    return manifest((paths.responses if online else paths.features)("{target}"))


def trained(variant):
    """The small file that names the last checkpoint of a finished training."""
    return str(paths.trained("{target}", "{drafter}", variant))


def released(given):
    """The manifest of the released drafter that a baseline starts from, if it starts from one."""
    if not settings.drafters[given.drafter].released:
        return []
    return manifest(paths.released(given.target, given.drafter))


def drafter(variant):
    """The manifest of an exported drafter."""
    return manifest(paths.drafter("{target}", "{drafter}", variant))


def servable(given):
    """Input function without an input: ends a run whose drafter the benchmark could not serve."""
    try:
        check_servable(settings, given.drafter)
    except CarryoverError as error:
        sys.exit(f"error: {error}")
    return []


def benchmark_rows(temperature):
    """The rows of a finished measurement (until then they are in a journal of their own)."""
    rows = paths.benchmark("{target}", "{drafter}", 0)
    return str(rows.with_name(f"temperature-{temperature}.jsonl"))
