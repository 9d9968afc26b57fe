"""On PYTHONPATH in tests only: lets vLLM's CPU build take the V2 model runner.

That runner is written in Triton. With TRITON_INTERPRET=1 Triton runs kernels in Python, on any
device, but vLLM looks for a Triton that was built for CPUs before it uses any. So one is entered
here, before vLLM is imported, also in the processes that vLLM starts; it compiles nothing.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.backends import Backend, backends
    from triton.language.extra import libdevice
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

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

    stock_call = InterpretedFunction.__call__

    def call(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """For speed. At each call of a device function the interpreter puts its operations into
        triton.language, which takes a millisecond, though it has just done so for the kernel that
        calls; only functions that read another module, triton.language.core, can need it."""
        if any(value is tl.core for value in self.fn.__globals__.values()):
            return stock_call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
    # For speed: checks of integer overflow, of which nothing but the debug mode reads the result.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    # A device's own function, of which the interpreter has only the name.
    libdevice.log1p = lambda x: tl.log(1.0 + x)
