# The target's hidden states of the selected layers, on every prompt and response.


rule features:
    input:
        target=rules.target.output.manifest,
        responses=rules.responses.output.manifest,
    output:
        manifest=manifest(paths.features("{target}")),
    log:
        f"{results}/logs/features/{{target}}.log",
    benchmark:
        f"{results}/benchmarks/features/{{target}}.tsv"
    conda:
        "../../envs/train.yaml"
    threads: ALL_CORES
    resources:
        mem_mb=8000,
        runtime=120,
    params:
        settings=SETTINGS,
        config=stage("features", "target"),
        code=stage_code("features"),
    shell:
        "python workflow/scripts/stage.py {log:q} features --config {params.settings:q}"
        " --target {wildcards.target}"
