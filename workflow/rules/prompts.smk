# The training prompts and the evaluation sets, apart: other benchmark prompts repeat no training.


rule train_prompts:
    output:
        paths.train_prompts(),
    log:
        f"{results}/logs/prompts/train.log",
    benchmark:
        f"{results}/benchmarks/prompts/train.tsv"
    conda:
        "../../envs/train.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        settings=SETTINGS,
        config=stage("train_prompts"),
        code=stage_code("prompts"),
    shell:
        "python workflow/scripts/stage.py {log:q} prompts --only train --config {params.settings:q}"


rule evaluation_prompts:
    output:
        [paths.evaluation(name) for name in settings.prompts.evaluation.datasets],
    log:
        f"{results}/logs/prompts/evaluation.log",
    benchmark:
        f"{results}/benchmarks/prompts/evaluation.tsv"
    conda:
        "../../envs/train.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        settings=SETTINGS,
        config=stage("evaluation_prompts"),
        code=stage_code("prompts"),
    shell:
        "python workflow/scripts/stage.py {log:q} prompts --only evaluation"
        " --config {params.settings:q}"
