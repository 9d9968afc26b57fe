"""On PYTHONPATH in tests only: lets vLLM's CPU build take the V2 model runner.

That runner is written in Triton. With TRITON_INTERPRET=1 Triton runs kernels in Python, on any
device, but vLLM looks for a Triton that was built for CPUs before it uses any. So one is entered
here, before vLLM is imported, also in the processes that vLLM starts; it compiles nothing.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import Backend, backends
    from triton.runtime.interpreter import InterpreterBuilder

    class InterpreterDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=InterpreterDriver)  # type: ignore[arg-type]

    stock_store = InterpreterBuilder.create_masked_store

    def store(self, pointers, value, mask, cache_policy):  # type: ignore[no-untyped-def]
        """Triton 3.9's interpreter spreads a scalar truth value to int8, and then refuses a mask
        that was combined with it, as vLLM does where it keeps the logits of drafts."""
        mask.data = mask.data.astype(bool)
        return stock_store(self, pointers, value, mask, cache_policy)

    InterpreterBuilder.create_masked_store = store
