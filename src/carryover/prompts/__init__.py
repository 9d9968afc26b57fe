"""The prompts stage: what the target answers (training) and is benchmarked on (evaluation)."""

from carryover.prompts.generate import KINDS, evaluation_prompts, train_prompts
from carryover.prompts.prompt import Prompt
from carryover.prompts.render import render
from carryover.prompts.stage import run

__all__ = ["KINDS", "Prompt", "evaluation_prompts", "render", "run", "train_prompts"]
