# The table, the figure and the page.


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
        png=paths.figure("acceptance_length.png"),
        svg=paths.figure("acceptance_length.svg"),
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
        code=source_hash("report"),
    shell:
        "python workflow/scripts/stage.py {log:q} report --config {params.settings:q}"
