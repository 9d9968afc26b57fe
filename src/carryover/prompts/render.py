"""The one way a prompt becomes token ids: responses, features, training and benchmark use it."""

from typing import Any


def render(tokenizer: Any, prompt: str, *, thinking: bool) -> list[int]:
    """Token ids of one user message up to where the assistant's answer starts.

    No system prompt is given (the paper's evaluation gives none); one that the template adds by
    itself stays. `thinking` reaches the template as `enable_thinking` where the template has it.
    """
    options = {"enable_thinking": thinking} if knows_thinking(tokenizer) else {}
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **options,
    )
    return list(ids)


def knows_thinking(tokenizer: Any) -> bool:
    """Whether the chat template has the switch `enable_thinking`."""
    return "enable_thinking" in (tokenizer.get_chat_template() or "")
