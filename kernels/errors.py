"""What the kernels say of arguments and places where they cannot run."""


class KernelError(ValueError):
    """One sentence that says what is wrong and what to do."""
