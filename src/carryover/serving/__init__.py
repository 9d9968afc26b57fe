"""Carryover drafters served by vLLM: a plugin of subclasses, pinned to known versions of vLLM.

    plugin.py         what vLLM calls at start-up: registers the drafter's architecture
    versions.py       the versions of vLLM that this package was written against
    refusal.py        what is registered instead under any other version
    drafter_config.py reads and checks a drafter's config.json against target and engine settings
    checkpoint.py     checks a drafter's tensors before they are loaded
    model.py          the draft model: stock DFlash plus E_carry
    dspark.py         the names under which vLLM's DSpark speculator calls it
    carry.py          which rows are carried: pure functions on tensors
    proposer.py       the round in the V1 runner: the rejected rows kept as context
    speculator.py     the round in the V2 runner, for dflash and dspark
    worker.py         puts these into vLLM's model runner
    corrections.py    two faults of vLLM 0.32 on CPU

Nothing here is imported before a carryover drafter is served, except `plugin` and `versions`.
"""
