"""Which Triton the machine knows: Gluon's operations change with every minor release."""

import triton

KNOWN = "3.9"


def require_known_triton() -> None:
    """ImportError unless Triton is of that minor release."""
    if triton.__version__.split(".")[:2] != KNOWN.split("."):
        raise ImportError(
            f"gluon_cpu: expected Triton {KNOWN}, whose operations it knows, got {triton.__version__}; install it with "
            f"pip install 'triton=={KNOWN}.*' (add --no-deps beside a torch that pins another)",
            name="gluon_cpu",
        )


require_known_triton()
