# Acceptance length and speed in vLLM at batch 1: autoregressive and the three trained variants.


rule benchmark:
    input:
        servable,
        target=rules.target.output.manifest,
        prompts=rules.evaluation_prompts.output,
        baseline=drafter("baseline"),
        control=drafter("control"),
        carryover=drafter("carryover"),
    output:
        rows=benchmark_rows("{temperature}"),
    log:
        f"{results}/logs/benchmark/{{target}}/{{drafter}}/temperature-{{temperature}}.log",
    benchmark:
        f"{results}/benchmarks/benchmark/{{target}}/{{drafter}}/temperature-{{temperature}}.tsv"
    conda:
        "../../envs/serve.yaml"
    threads: ALL_CORES
    resources:
        mem_mb=8000,
        runtime=120,
        bench=1,
    params:
        settings=SETTINGS,
        config=stage("benchmark", "target", "drafter"),
        code=stage_code("benchmark"),
    shell:
        "python workflow/scripts/stage.py {log:q} benchmark --config {params.settings:q}"
        " --target {wildcards.target} --drafter {wildcards.drafter}"
        " --temperature {wildcards.temperature}"
