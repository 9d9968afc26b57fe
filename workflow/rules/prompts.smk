# The training prompts and the evaluation sets.


rule prompts:
    output:
        train=paths.train_prompts(),
        evaluation=[
            paths.evaluation(name) for name in settings.prompts.evaluation.datasets
        ],
    log:
        f"{results}/logs/prompts.log",
    benchmark:
        f"{results}/benchmarks/prompts.tsv"
    conda:
        "../../envs/train.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        settings=SETTINGS,
        config=stage("prompts"),
        code=source_hash("prompts"),
    shell:
        "python workflow/scripts/stage.py {log:q} prompts --config {params.settings:q}"
