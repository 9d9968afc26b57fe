# The table, the figures and the page.


rule report:
    input:
        benchmark=expand(
            rules.benchmark.output.rows,
            target=settings.targets,
            drafter=settings.drafters,
            temperature=[f"{value:g}" for value in settings.benchmark.temperatures],
        ),
    output:
        csv=paths.speedup_csv(),
        markdown=paths.speedup_md(),
        comparison=paths.comparison_csv(),
        manifest=manifest(paths.speedup_csv().parent),
        figures=[
            paths.figure(f"{name}.{kind}")
            for name in ("acceptance_length", "speedup", "training_loss")
            for kind in ("png", "svg")
        ],
        page=paths.report(),
    log:
        f"{results}/logs/report.log",
    benchmark:
        f"{results}/benchmarks/report.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        settings=SETTINGS,
        config=stage("report"),
        code=stage_code("report"),
    shell:
        "python workflow/scripts/stage.py {log:q} report --config {params.settings:q}"
