# The drafters. Checkpoints lie in a folder that is named after the config and declared by no rule:
# Snakemake deletes the declared outputs of a job that fails, and a rerun goes on from them.


# A released drafter to start from, checked against the config before anything long runs.
rule released:
    input:
        target=rules.target.output.manifest,
    output:
        manifest=manifest(paths.released("{target}", "{drafter}")),
    log:
        f"{results}/logs/released/{{target}}/{{drafter}}.log",
    benchmark:
        f"{results}/benchmarks/released/{{target}}/{{drafter}}.tsv"
    priority: 1
    conda:
        "../../envs/train.yaml"
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        settings=SETTINGS,
        config=stage("released", "target", "drafter"),
        content=lambda given: source_content(
            settings.drafters[given.drafter].initialize
        ),
        code=stage_code("released"),
    shell:
        "python workflow/scripts/stage.py {log:q} released --config {params.settings:q}"
        " --target {wildcards.target} --drafter {wildcards.drafter}"


rule train_baseline:
    input:
        target=rules.target.output.manifest,
        recorded=recorded(),
        released=released,
    output:
        trained=trained("baseline"),
    log:
        f"{results}/logs/train/{{target}}/{{drafter}}/baseline.log",
    benchmark:
        f"{results}/benchmarks/train/{{target}}/{{drafter}}/baseline.tsv"
    conda:
        "../../envs/train.yaml"
    threads: ALL_CORES
    resources:
        **several_nodes(),
        mem_mb=8000,
        runtime=240,
    params:
        settings=SETTINGS,
        config=lambda given: settings.stage(
            "train", given.target, given.drafter, "baseline"
        ),
        code=stage_code("train"),
    shell:
        "python workflow/scripts/stage.py {log:q} train --config {params.settings:q}"
        " --target {wildcards.target} --drafter {wildcards.drafter} --variant baseline"


# `control` and `carryover`: the same number of further steps, without and with carried rows.
rule train_further:
    input:
        target=rules.target.output.manifest,
        recorded=recorded(),
        baseline=rules.train_baseline.output.trained,
    output:
        trained=trained("{variant}"),
    log:
        f"{results}/logs/train/{{target}}/{{drafter}}/{{variant}}.log",
    benchmark:
        f"{results}/benchmarks/train/{{target}}/{{drafter}}/{{variant}}.tsv"
    wildcard_constraints:
        variant="control|carryover",
    conda:
        "../../envs/train.yaml"
    threads: ALL_CORES
    resources:
        **several_nodes(),
        mem_mb=8000,
        runtime=240,
    params:
        settings=SETTINGS,
        config=stage("train", "target", "drafter", "variant"),
        code=stage_code("train"),
    shell:
        "python workflow/scripts/stage.py {log:q} train --config {params.settings:q}"
        " --target {wildcards.target} --drafter {wildcards.drafter} --variant {wildcards.variant}"


# A drafter folder that vLLM loads.
rule export:
    input:
        target=rules.target.output.manifest,
        trained=trained("{variant}"),
    output:
        manifest=drafter("{variant}"),
    log:
        f"{results}/logs/export/{{target}}/{{drafter}}/{{variant}}.log",
    benchmark:
        f"{results}/benchmarks/export/{{target}}/{{drafter}}/{{variant}}.tsv"
    conda:
        "../../envs/train.yaml"
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        settings=SETTINGS,
        config=stage("export", "target", "drafter", "variant"),
        code=stage_code("export"),
    shell:
        "python workflow/scripts/stage.py {log:q} export --config {params.settings:q}"
        " --target {wildcards.target} --drafter {wildcards.drafter} --variant {wildcards.variant}"
