# The target answers every training prompt, in vLLM.


rule responses:
    input:
        target=rules.target.output.manifest,
        prompts=rules.train_prompts.output,
    output:
        manifest=manifest(paths.responses("{target}")),
    log:
        f"{results}/logs/responses/{{target}}.log",
    benchmark:
        f"{results}/benchmarks/responses/{{target}}.tsv"
    conda:
        "../../envs/serve.yaml"
    threads: ALL_CORES
    resources:
        mem_mb=8000,
        runtime=120,
    params:
        settings=SETTINGS,
        config=stage("responses", "target"),
        code=stage_code("responses"),
    shell:
        "python workflow/scripts/stage.py {log:q} responses --config {params.settings:q}"
        " --target {wildcards.target}"
