# Carryover Drafting, from prompts to figures: one rule file a stage, in the order of the includes.
#
#   snakemake --cores all                                          the default scale, on a laptop
#   snakemake -n --configfile config/paper.yaml --workflow-profile profiles/slurm    the paper's
#
# The target answers the training prompts; its hidden states on prompt and response train a
# baseline drafter, from which `control` (more of the same) and `carryover` (with carried rows) go
# on; all three are exported and measured in vLLM beside plain decoding.


configfile: "config/config.yaml"


include: "workflow/rules/common.smk"


rule all:
    input:
        paths.speedup_csv(),
        paths.report(),


include: "workflow/rules/target.smk"
include: "workflow/rules/prompts.smk"
include: "workflow/rules/responses.smk"
include: "workflow/rules/features.smk"
include: "workflow/rules/training.smk"
include: "workflow/rules/benchmark.smk"
include: "workflow/rules/report.smk"


# What runs elsewhere on a cluster has no network there, or is done in seconds.
localrules:
    all,
    target,
    released,
    train_prompts,
    evaluation_prompts,
    report,


# The stages read this file. It is no rule's input: what a rule depends on is its part of the
# config, which is in its params, so an unrelated edit reruns nothing.
onstart:
    write_settings()
